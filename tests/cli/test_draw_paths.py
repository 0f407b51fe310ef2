"""Drawings of pasted matrices: grouped by what lies between devices, and silent about what the paste does not tell."""

from collections.abc import Iterator
from itertools import combinations

from draw_support import cpus, nodes
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.draw.device import DrawnDevice
from topoalign.tools.draw.diagram import Diagram, diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.pci_bridges import Bridge, Child, devices_in
from topoalign.tools.draw.scene import Box, Text
from topoalign.tools.draw.text import render_text
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

FARTHEST_FIRST = ["SYS", "NODE", "PHB", "PXB", "PIX"]
PAIRS = """
	GPU0	GPU1	GPU2	GPU3	NIC0	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	PIX	PHB	SYS	PXB	0-3	0		N/A
GPU1	PIX	 X 	PHB	SYS	PXB	0-3	0		N/A
GPU2	PHB	PHB	 X 	SYS	PHB	0-3	0		N/A
GPU3	SYS	SYS	SYS	 X 	SYS	4-7	5		N/A
NIC0	PXB	PXB	PHB	SYS	 X

Legend:
"""


def test_a_pasted_matrix_is_drawn_by_path_groups_without_sockets() -> None:
    """A pasted matrix is drawn in groups by its PCIe paths, and without sockets."""
    drawn = render_text(diagram_of("pasted", read_pasted_matrix(PAIRS)), 60, ascii_only=True)

    assert "\n".join(line.rstrip("| ") for line in drawn.splitlines()) == PICTURE


PICTURE = """pasted
2 NUMA nodes, CPUs 0-7, 4 GPUs, 1 NIC

+- Sockets unknown ----------------------------------------+
| +- NUMA 0 ---------------------------------------------+
| | CPUs 0-3
| | PHB
| | +- PXB
| | |  +- PIX
| | |  |  +- [GPU0] [GPU1]
| | |  +- [NIC0]
| | +- [GPU2]
| +------------------------------------------------------+
| +- NUMA 5 ---------------------------------------------+
| | CPUs 4-7
| | [GPU3]
| +------------------------------------------------------+
+----------------------------------------------------------+
PIX: between these devices is at most one PCIe bridge
PXB: between these devices are several PCIe bridges, but not
  the host bridge
PHB: between these devices is the PCIe host bridge"""


def test_a_picture_shows_the_same_groups_as_the_drawing_in_characters() -> None:
    scene = scene_of(diagram_of("pasted", read_pasted_matrix(PAIRS)))

    bars = [
        (box.role, box.tooltip[:3]) for box in scene.items if isinstance(box, Box) and box.role in ("host", "switch")
    ]
    assert [("host", "PHB"), ("switch", "PXB"), ("switch", "PIX")] == bars
    assert {"PHB", "PXB", "PIX", "Sockets unknown"} <= {item.text for item in scene.items if isinstance(item, Text)}


def test_without_the_column_of_numa_nodes_no_node_is_named() -> None:
    lines = [
        line.replace("\tNUMA Affinity\tGPU NUMA ID", "").replace("\t0\t\tN/A", "").replace("\t5\t\tN/A", "")
        for line in PAIRS.splitlines()
    ]
    diagram = diagram_of("pasted", read_pasted_matrix("\n".join(lines)))

    assert ("CPUs 0-7, 4 GPUs, 1 NIC",) == diagram.facts
    assert ["near these CPUs"] * 2 == [place.title for group in diagram.groups for place in group.places]
    assert not [device.tooltip for device in diagram.devices if "NUMA unknown" not in device.tooltip]


def test_a_machine_whose_sockets_are_known_is_drawn_by_its_sockets() -> None:
    diagram = diagram_of("x", Topology(cpus=cpus(2), nodes=nodes(2)))

    assert ["Socket 0", "Socket 1"] == [group.title for group in diagram.groups]
    assert "2 sockets, 2 NUMA nodes, CPUs 0-7, 0 GPUs, 0 NICs" == diagram.facts[0]


def test_a_nic_is_near_the_nearest_gpu_and_not_the_first_on_its_node() -> None:
    matrix = """
	GPU0	GPU1	NIC0	NIC1	CPU Affinity	NUMA Affinity
GPU0	 X 	NODE	NODE	NODE	0-3	0
GPU1	NODE	 X 	PIX	NODE	4-7	1
NIC0	NODE	PIX	 X 	NODE
NIC1	NODE	NODE	NODE	 X

Legend:
"""
    assert [(1,), (0,)] == [nic.numa_affinity for nic in read_pasted_matrix(matrix).nics]


def machine(count: int, links: dict[tuple[int, int], str | None]) -> Diagram:
    """GPUs on one NUMA node, with these paths between them. None: hidden by NVLinks."""
    return diagram_of(
        "x",
        Topology(
            cpus=cpus(1),
            nodes=nodes(1),
            gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, numa_affinity=(0,)) for i in range(count)),
            links=tuple(
                Link(
                    a=DeviceID(f"GPU-{a}"),
                    b=DeviceID(f"GPU-{b}"),
                    pcie=None if path is None else PcieClass(path),
                    fabric_links=2 * (path is None),
                )
                for (a, b), path in links.items()
            ),
        ),
    )


def groups_of(diagram: Diagram) -> dict[frozenset[int], str]:
    def walk(children: tuple[Child, ...]) -> Iterator[tuple[frozenset[int], str]]:
        for child in children:
            if isinstance(child, Bridge):
                assert child.path is not None
                yield frozenset(device.index for device in devices_in([child])), child.path.value
                yield from walk(child.children)

    return dict(walk(diagram.groups[0].places[0].children))


@given(st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=1, max_size=10), st.data())
def test_a_hierarchy_of_bridges_is_drawn_as_it_was(ways: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Each GPU hangs from a host bridge, a bridge below it and one below that: what two share is their path."""
    links: dict[tuple[int, int], str | None] = {}
    for a, b in combinations(range(len(ways)), 2):
        shared = next((level for level in range(3) if ways[a][level] != ways[b][level]), 3)
        links[a, b] = FARTHEST_FIRST[1 + shared]
    expected = {}
    for level, path in (
        (1, "PHB"),
        (2, "PXB"),
        (3, "PIX"),
    ):  # a nearer path of the same GPUs takes the place of a farther
        for way in {way[:level] for way in ways}:
            inside = frozenset(i for i, one in enumerate(ways) if one[:level] == way)
            if len(inside) > 1:
                expected[inside] = path

    assert expected == groups_of(machine(len(ways), links))


@given(st.integers(1, 7), st.data())
def test_no_group_says_of_two_devices_what_their_cell_denies(count: int, data: st.DataObject) -> None:
    cells = st.sampled_from([None, *FARTHEST_FIRST])
    links = {pair: data.draw(cells) for pair in combinations(range(count), 2)}
    diagram = machine(count, links)

    assert [*range(count)] == sorted(device.index for device in diagram.devices)
    for group, path in groups_of(diagram).items():
        for a, b in combinations(sorted(group), 2):
            cell = links[a, b]
            assert cell is None or FARTHEST_FIRST.index(cell) >= FARTHEST_FIRST.index(path), (group, path, a, b, cell)
    assert all(isinstance(device, DrawnDevice) for device in diagram.devices)


def test_the_matrix_of_a_paste_without_numa_nodes_has_no_column_of_them() -> None:
    paste = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-3\nGPU1\tSYS\t X \t4-7\n"

    assert "\tGPU0\tGPU1\tCPU Affinity\tGPU NUMA ID" == print_matrix(read_pasted_matrix(paste)).splitlines()[0]
