"""Sets of NUMA nodes, scores of connections, and what devices are called, against what the words mean."""

from itertools import combinations

import msgspec
import pytest
from fact_support import mig_device
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import (
    EVERYWHERE,
    masks_by_size,
    narrowness,
    node_mask,
    nodes_of,
    several,
    union,
)
from topoalign.core.model.topology.cpu_topology import invert_groups
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_names import name_device
from topoalign.core.model.topology.model import (
    Cpu,
    Fabric,
    Gpu,
    Nic,
    PluginDevice,
    Topology,
    VirtualFunction,
)
from topoalign.core.model.topology.queries import affinity, connection_score, pcie_class, share_node

G0, G1, G2, N0 = (DeviceID(name) for name in ("GPU-a", "GPU-b", "GPU-c", "mlx5_0"))
node_sets = st.frozensets(st.integers(0, 300), max_size=6)


@given(node_sets, node_sets)
def test_a_mask_is_a_set_of_nodes(one: frozenset[int], other: frozenset[int]) -> None:
    assert tuple(sorted(one)) == nodes_of(node_mask(one))
    assert one | other == {*nodes_of(union([node_mask(one), node_mask(other)]))}
    assert (len(one) > 1) is several(node_mask(one))
    assert (len(one), node_mask(one)) == narrowness(node_mask(one))
    assert node_mask(one) == node_mask(one) & EVERYWHERE


@given(st.lists(st.integers(0, 80), unique=True, max_size=6))
def test_all_sets_of_nodes_come_by_size_in_the_order_of_positions(nodes: list[int]) -> None:
    expected = [{*each} for size in range(1, len(nodes) + 1) for each in combinations(nodes, size)]

    assert expected == [{*nodes_of(mask)} for mask in masks_by_size(nodes)]


def test_a_list_may_name_each_id_twice_and_no_more_than_that() -> None:
    """Repetitions count: the same range a thousand times is an attack."""
    assert 65_536 == len(parse_cpuset("0-65535,0-65535"))
    with pytest.raises(ValueError, match="more than 131072 ids"):
        parse_cpuset("0-65535,0-65535,0")


def machine(*links: Link, fabrics: tuple[Fabric | None, ...] = (None, None, None)) -> Topology:
    near = ((0,), (0, 1), ())
    return Topology(
        gpus=tuple(
            Gpu(id=id, index=i + 3, pci=f"pci-{i}", numa_affinity=near[i], fabric=fabrics[i])
            for i, id in enumerate((G0, G1, G2))
        ),
        nics=(Nic(id=N0, index=7, pci="pci-n", numa_affinity=(1,)),),
        links=links,
    )


@pytest.mark.parametrize(
    ("pcie", "score"),
    [
        (PcieClass.PSB, 60),
        (PcieClass.PIX, 50),
        (PcieClass.PXB, 40),
        (PcieClass.PHB, 30),
        (PcieClass.NODE, 20),
        (PcieClass.SYS, 10),
    ],
)
def test_a_connection_is_worth_what_go_gpuallocator_gives_it(pcie: PcieClass, score: int) -> None:
    """Each NVLink adds 100 to the PCIe path. Both orders of a pair are the same."""
    plain, linked = (machine(Link(a=G0, b=N0, pcie=pcie, fabric_links=count)) for count in (0, 3))

    assert (score, score) == (connection_score(plain, G0, N0), connection_score(plain, N0, G0))
    assert score + 300 == connection_score(linked, N0, G0)
    assert pcie is pcie_class(plain, N0, G0)
    assert (pcie.value, "NV3") == (plain.links[0].label, linked.links[0].label)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(G0, G1, PcieClass.NODE), (G1, N0, PcieClass.NODE), (G0, N0, PcieClass.SYS), (G0, G2, PcieClass.SYS)],
)
def test_an_unknown_path_is_judged_by_the_numa_nodes(a: DeviceID, b: DeviceID, expected: PcieClass) -> None:
    """With no link at all, and with one of which only the NVLinks are known. An unknown node is no common node."""
    bare, linked = machine(), machine(Link(a=a, b=b, fabric_links=2))
    score = 20 if expected is PcieClass.NODE else 10

    assert (expected, expected) == (pcie_class(bare, a, b), pcie_class(linked, b, a))
    assert (score, score + 200) == (connection_score(bare, a, b), connection_score(linked, a, b))
    assert (expected is PcieClass.NODE) is share_node(bare, a, b)
    assert "NV2" == linked.links[0].label
    assert "SYS" == Link(a=a, b=b).label


ONE, TWO = Fabric(cluster="c", clique=1), Fabric(cluster="c", clique=2)


@pytest.mark.parametrize(
    ("fabrics", "score"),
    [((ONE, TWO, None), 50), ((ONE, ONE, None), 150), ((ONE, None, None), 150), ((None, None, None), 150)],
)
def test_nvlinks_count_unless_cliques_are_kept_apart(fabrics: tuple[Fabric | None, ...], score: int) -> None:
    assert score == connection_score(
        machine(Link(a=G0, b=G1, pcie=PcieClass.PIX, fabric_links=1), fabrics=fabrics), G0, G1
    )


def test_near_a_device_are_the_nodes_that_it_has() -> None:
    assert [(0, 1), (1,), (), ()] == [affinity(machine(), each) for each in (G1, N0, G2, DeviceID("none"))]


def test_a_device_is_called_by_its_index_and_its_part() -> None:
    mig = mig_device("MIG-1", 0, memory=1)
    plain = machine()
    topology = msgspec.structs.replace(
        plain,
        gpus=(msgspec.structs.replace(plain.gpus[0], mig=(mig,)), *plain.gpus[1:]),
        nics=(msgspec.structs.replace(plain.nics[0], virtual_functions=(VirtualFunction(pci="0000:99:00.1"),)),),
        others=(PluginDevice(id=DeviceID("x"), resource=ResourceName("example.com/x"), nodes=(4,)),),
    )

    def called(resource: ResourceName, device: str) -> tuple[str, int | None, str | None, tuple[int, ...]]:
        got = name_device(topology, resource, DeviceID(device))
        assert (resource, device) == (got.resource, got.id)
        return got.short, got.index, got.pci, got.numa_affinity

    assert ("GPU4", 4, "pci-1", (0, 1)) == called(GPU, G1)
    assert ("GPU3::1", 3, "pci-0", (0,)) == called(GPU, f"{G0}::1")
    assert ("GPU3/MIG-1::0", 3, "pci-0", (0,)) == called(GPU, "MIG-1::0")
    assert ("NIC7", 7, "pci-n", (1,)) == called(NIC, N0)
    assert ("NIC7/0000:99:00.1", 7, "pci-n", (1,)) == called(NIC, "0000:99:00.1")
    assert ("x", None, None, (4,)) == called(ResourceName("example.com/x"), "x")
    assert ("gone", None, None, ()) == called(GPU, "gone")


def test_a_device_is_listed_with_the_first_of_its_nodes_that_has_cpus() -> None:
    """GB200 reports fifteen nodes for a GPU; a node without CPUs is listed where there is no other."""
    topology = Topology(
        cpus=(Cpu(id=0, core=0, socket=0, node=2, uncore=0), Cpu(id=1, core=1, socket=0, node=3, uncore=0))
    )

    assert [(2,), (3,), (9,), None] == [topology.listed_nodes(near) for near in ((9, 2, 3), (3, 2), (9, 8), ())]


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 5)))
def test_cpus_are_grouped_by_ascending_group(group_of: dict[int, int]) -> None:
    """In whatever order they are listed: the first group is tried first."""
    expected = [
        (group, frozenset(cpu for cpu in group_of if group_of[cpu] == group)) for group in sorted({*group_of.values()})
    ]

    assert expected == [*invert_groups(group_of).items()]
