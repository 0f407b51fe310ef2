"""Which GPUs are degraded, by the rule of `core.model.topology.degraded`."""

from collections.abc import Mapping
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.machines import catalogue
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

GPUS = tuple(DeviceID(f"GPU-{i}") for i in range(8))
OFF, HALF = "it has no NVLink, its peers have 18", "9 of 18 NVLinks are up"
DEGRADED_SHAPES = {"hgx-b200-gpu0-off": OFF, "hgx-b200-gpu0-half": HALF}


def with_fields(topology: Topology, fields: Mapping[int, Mapping[str, object]]) -> Topology:
    """`fields`: index of a GPU -> fields of it to replace."""
    gpus = tuple(msgspec.structs.replace(gpu, **fields.get(gpu.index, {})) for gpu in topology.gpus)
    return msgspec.structs.replace(topology, gpus=gpus)


def without_links(topology: Topology, lost: Mapping[tuple[int, int], int]) -> Topology:
    """`lost`: pair of GPUs -> how many of its NVLinks are down; both ends report them as down."""
    gone = {(GPUS[a], GPUS[b]): count for (a, b), count in lost.items()}
    links = tuple(
        msgspec.structs.replace(link, fabric_links=link.fabric_links - gone.get((link.a, link.b), 0))
        for link in topology.links
    )
    down = {i: {"links_down": sum(n for pair, n in lost.items() if i in pair)} for i in range(len(topology.gpus))}
    return msgspec.structs.replace(with_fields(topology, down), links=links)


@pytest.mark.parametrize("name", catalogue.names())
def test_of_the_catalogue_only_the_degraded_shapes_are_degraded(name: str) -> None:
    expected = {GPUS[0]: DEGRADED_SHAPES[name]} if name in DEGRADED_SHAPES else {}

    assert expected == degraded_gpus(catalogue.machine(name))


@pytest.mark.parametrize("name", [name for name in catalogue.names() if name != "cpu-only"])
def test_a_pasted_matrix_says_the_same_although_it_has_no_switch(name: str) -> None:
    expected = {GPUS[0]: DEGRADED_SHAPES[name]} if name in DEGRADED_SHAPES else {}

    assert expected == degraded_gpus(read_pasted_matrix(print_matrix(catalogue.machine(name))))


@pytest.mark.parametrize(
    "topology",
    [Topology(), Topology(gpus=(Gpu(id=GPUS[0], index=0, links_down=12),)), catalogue.machine("8x-l40s")],
    ids=["no GPU", "one GPU without a bridge", "no NVLinks"],
)
def test_without_nvlinks_no_gpu_is_degraded(topology: Topology) -> None:
    assert {} == degraded_gpus(topology)


def test_boards_without_a_bridge_are_not_degraded() -> None:
    """NVML reports all links of a board without a bridge as down."""
    machine = with_fields(catalogue.machine("a100-missing-bridge"), {2: {"links_down": 12}, 3: {"links_down": 12}})

    assert {} == degraded_gpus(machine)


def test_a_bridge_that_has_lost_links_is_named_at_both_ends() -> None:
    machine = without_links(catalogue.machine("8x-nvlink-pairs"), {(4, 5): 1})

    assert {GPUS[4]: "3 of 4 NVLinks are up", GPUS[5]: "3 of 4 NVLinks are up"} == degraded_gpus(machine)


def test_a_link_of_a_mesh_that_is_down_is_named_at_both_ends() -> None:
    machine = without_links(catalogue.machine("dgx1-volta"), {(0, 1): 1})

    assert {GPUS[0]: "5 of 6 NVLinks are up", GPUS[1]: "5 of 6 NVLinks are up"} == degraded_gpus(machine)


def test_a_gpu_of_a_mesh_without_any_link_is_named_with_its_neighbours() -> None:
    """All its links have their other ends in the mesh, so it is not a board without a bridge."""
    machine = without_links(catalogue.machine("dgx1-volta"), {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2})

    assert {
        GPUS[0]: "it has no NVLink, its peers have 6",
        GPUS[1]: "5 of 6 NVLinks are up",
        GPUS[2]: "5 of 6 NVLinks are up",
        GPUS[3]: "4 of 6 NVLinks are up",
        GPUS[4]: "4 of 6 NVLinks are up",
    } == degraded_gpus(machine)


@pytest.mark.parametrize("down", [(2, 2, 1, 1), (0, 0, 0, 0)])
def test_half_of_a_mesh_in_a_virtual_machine_is_not_degraded(down: tuple[int, ...]) -> None:
    """Four of the eight GPUs of a DGX-1: uneven by design; links to the other half may be there and down."""
    machine = catalogue.machine("dgx1-volta")
    half = msgspec.structs.replace(
        with_fields(machine, {i: {"links_down": count} for i, count in enumerate(down)}),
        links=tuple(link for link in machine.links if {link.a, link.b} <= {*GPUS[:4]}),
    )

    assert {} == degraded_gpus(msgspec.structs.replace(half, gpus=half.gpus[:4]))


def test_a_link_to_a_device_that_is_not_there_counts_for_the_other_end() -> None:
    """Topologies that are received are not validated."""
    machine = catalogue.machine("hgx-b200-gpu0-half")

    assert {} == degraded_gpus(msgspec.structs.replace(machine, gpus=machine.gpus[1:]))


def test_gpus_of_another_model_are_no_peers() -> None:
    machine = with_fields(catalogue.machine("hgx-b200-gpu0-off"), {0: {"name": "NVIDIA L4"}})

    assert {} == degraded_gpus(machine)


def test_a_gpu_in_mig_mode_is_not_judged_by_its_links() -> None:
    mig = (MigDevice(uuid=DeviceID("MIG-0"), profile="7g.40gb", gpu_instance=0, compute_instance=0, memory=1),)
    machine = with_fields(catalogue.machine("dgx-a100"), {5: {"mig": mig, "switch_links": 0, "links_down": 12}})

    assert {} == degraded_gpus(machine)


def test_the_state_of_the_fabric_is_named_beside_the_links() -> None:
    machine = with_fields(
        catalogue.machine("hgx-b200-gpu0-half"),
        {
            0: {"fabric_state": "degraded"},
            1: {"fabric_state": "not-started"},
            2: {"fabric_state": "of a later version"},
        },
    )

    assert {
        GPUS[0]: f"{HALF}, and its NVLink fabric is degraded",
        GPUS[1]: "its NVLink fabric is not started",
        GPUS[2]: "the state of its NVLink fabric is of a later version",
    } == degraded_gpus(machine)


@given(st.lists(st.integers(0, 18), min_size=1, max_size=8), st.booleans())
def test_on_a_switch_the_gpus_below_the_most_are_degraded(counts: list[int], shows_switch: bool) -> None:
    """Of four or more GPUs with most links also where the switch is not shown, as in a matrix."""
    most = max(counts)
    if not shows_switch:
        counts, most = [*counts[:4], 18, 18, 18, 18], 18
    gpus = tuple(Gpu(id=GPUS[i], index=i, switch_links=count if shows_switch else 0) for i, count in enumerate(counts))
    links = tuple(
        Link(a=GPUS[a], b=GPUS[b], pcie=PcieClass.SYS, fabric_links=min(counts[a], counts[b]))
        for a, b in combinations(range(len(counts)), 2)
    )
    expected = {
        GPUS[i]: f"{count} of {most} NVLinks are up" if count else f"it has no NVLink, its peers have {most}"
        for i, count in enumerate(counts)
        if count < most
    }

    assert expected == degraded_gpus(Topology(gpus=gpus, links=links))
