"""gpu-manager's display: the tree of GPUs as text, and who uses them, in its fields and units."""

import re

import msgspec
import pytest
from slot_support import in_slots
from unit_support import CORES, MEMORY, in_units
from use_support import GIB, MACHINE, NODE, SHARED, UIDS, held, in_pod, measurement, on_host, owner, process, use

from topoalign.core.model.events import Allocation, AllocationsSnapshot, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.core.usage.attribution import attribute_use
from topoalign.core.usage.gaia_display import bus_id, graph_of, usages_of

HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
FOUR = Topology(
    gpus=tuple(
        Gpu(id=DeviceID(f"GPU-{n}"), index=n, memory=80 * GIB, pci=f"0000:{7 + n:02x}:00.0", name="H100")
        for n in range(4)
    ),
    links=tuple(
        Link(
            a=DeviceID(f"GPU-{a}"),
            b=DeviceID(f"GPU-{b}"),
            pcie=PcieClass.PIX if (a, b) in {(0, 1), (2, 3)} else PcieClass.SYS,
        )
        for a in range(4)
        for b in range(a + 1, 4)
    ),
)
USED = (
    use("GPU-0", process(72, GIB, in_pod(UIDS[0]), 40), process(7, None, on_host())),
    use("GPU-1"),
    use("GPU-2", process(9, 2 * GIB, in_pod(UIDS[1]), 5)),
    use("GPU-3"),
)


def node(*allocations: Allocation, machine: Topology = FOUR, ailing: str = "") -> NodeState:
    health = {gpu.id: HEALTHY for gpu in machine.gpus if gpu.id != ailing}
    snapshot = AllocationsSnapshot(node=NODE, epoch=1, seq=1, allocations=allocations, digest="")
    return initial_state(NODE, machine, health, "test").apply(snapshot)


def graph(state: NodeState, *uses: object) -> str:
    return graph_of(state, attribute_use(state, measurement(*uses)))  # type: ignore[arg-type]  # uses of any kind


def test_the_graph_is_the_tree_with_what_is_left_of_each_card() -> None:
    """GPU-0 is held whole, GPU-2 in slices of time, of which nobody knows how much they are."""
    whole, sliced = tuple(FOUR.gpus[n].id for n in (0, 1, 3)), (FOUR.gpus[2].id,)
    offers = (Offer(resource=GPU, devices=whole), Offer(resource=SHARED, devices=sliced, replicas=2))
    state = node(
        held(1, "GPU-0", of=owner("train"), uid=UIDS[0]),
        held(2, "GPU-2::0", of=owner("infer"), uid=UIDS[1], resource=SHARED),
        machine=msgspec.structs.replace(FOUR, offers=offers),
    )
    none = "pids: [], usedMemory: 0, totalMemory: 0, allocatableCores: 0, allocatableMemory: 0"
    total = 80 * GIB

    expected = (
        "ROOT:2\n"
        f"|---SYS (aval: 2, {none})\n"
        f"|   |---PIX (aval: 1, {none})\n"
        f"|   |   |---GPU0 (pids: [7 72], usedMemory: {GIB}, totalMemory: {total}, allocatableCores: 0, "
        "allocatableMemory: 0)\n"
        f"|   |   |---GPU1 (pids: [], usedMemory: 0, totalMemory: {total}, allocatableCores: 100, "
        f"allocatableMemory: {total})\n"
        f"|   |---PIX (aval: 1, {none})\n"
        f"|   |   |---GPU2 (pids: [9], usedMemory: {2 * GIB}, totalMemory: {total}, allocatableCores: 100, "
        f"allocatableMemory: {total})\n"
        f"|   |   |---GPU3 (pids: [], usedMemory: 0, totalMemory: {total}, allocatableCores: 100, "
        f"allocatableMemory: {total})\n"
    )
    assert expected == graph(state, *USED)


def test_the_fuller_of_two_nodes_stands_first() -> None:
    """Cards 2 and 3 hang together below a switch and are held; 0 and 1, which are free, stand after them."""
    state = node(held(1, "GPU-2", "GPU-3", of=owner("train"), uid=UIDS[0]))
    names = [line.partition(" (")[0] for line in graph(state, *USED).splitlines()]

    assert ["ROOT:2", "|---SYS", "|   |---PIX", "|   |   |---GPU2", "|   |   |---GPU3"] == names[:5]


def test_a_card_of_which_a_slice_is_held_is_not_free() -> None:
    """It has all of its amounts left, because a slice has none."""
    offers = (Offer(resource=SHARED, devices=(FOUR.gpus[2].id,), replicas=2),)
    machine = msgspec.structs.replace(FOUR, offers=offers)
    state = node(held(1, "GPU-2::0", of=owner("infer"), uid=UIDS[1], resource=SHARED), machine=machine)

    assert HealthState.HEALTHY is state.health_of(machine.gpus[2].id).state
    assert graph(state, *USED).startswith("ROOT:3\n")


def test_a_card_that_may_not_be_given_is_not_counted() -> None:
    assert graph(node(ailing="GPU-1"), *USED).startswith("ROOT:3\n")


def left(state: NodeState, gpu: int) -> tuple[int, int]:
    """Cores and memory of a card, as the graph tells them."""
    (line,) = [line for line in graph(state, *USED).splitlines() if f"---GPU{gpu} " in line]
    cores, memory = re.findall(r"allocatable[A-Z][a-z]+: ([0-9]+)", line)
    return int(cores), int(memory)


def test_of_a_scaled_card_in_slots_what_may_be_given_is_left() -> None:
    """Of 200 cores and 160 GiB in four slots: a quarter each, as `gpu list` says."""
    machine = in_slots(FOUR, 4, 2, Slots(memory_scaling=2.0, core_scaling=2.0))
    state = node(held(1, "GPU-0::0", of=owner("a"), uid=UIDS[0], resource=GPU), machine=machine)

    assert [(150, 120 * GIB), (200, 160 * GIB)] == [left(state, gpu) for gpu in (0, 1)]


def test_of_a_card_in_units_without_cores_or_memory_nothing_is_left() -> None:
    """Whoever gets some of one needs some of the other."""
    cores = [f"GPU-0::c{n}" for n in range(100)]
    memory = [f"GPU-1::m{n}" for n in range(320)]
    state = node(
        held(1, *cores, of=owner("a"), uid=UIDS[0], resource=CORES),
        held(2, *memory, of=owner("b"), uid=UIDS[1], resource=MEMORY),
        machine=in_units(FOUR, 3),
    )

    assert [(0, 0), (0, 0), (100, 80 * GIB)] == [left(state, gpu) for gpu in range(3)]


@pytest.mark.parametrize("way", ["whole", "units", "slots", "slices"])
def test_of_a_card_that_may_not_be_given_nothing_is_left(way: str) -> None:
    slices = (Offer(resource=SHARED, devices=(FOUR.gpus[0].id,), replicas=2),)
    machines = {
        "whole": FOUR,
        "units": in_units(FOUR, 4),
        "slots": in_slots(FOUR, 4),
        "slices": msgspec.structs.replace(FOUR, offers=slices),
    }

    assert (100, 80 * GIB) == left(node(machine=machines[way]), 0)
    assert (0, 0) == left(node(machine=machines[way], ailing="GPU-0"), 0)


def test_of_a_card_in_mig_mode_without_instances_nothing_is_left() -> None:
    gpus = (msgspec.structs.replace(FOUR.gpus[0], mig=()), *FOUR.gpus[1:])

    assert (0, 0) == left(node(machine=msgspec.structs.replace(FOUR, gpus=gpus)), 0)


def test_cards_of_which_no_ancestor_is_known_hang_below_the_root() -> None:
    """And one with MIG instances has nothing to allocate."""
    lines = graph(node(machine=MACHINE)).splitlines()

    assert ["ROOT:2", "|---GPU0", "|---GPU1", "|---GPU2"] == [line.partition(" (")[0] for line in lines]
    assert ["allocatableCores: 100", "allocatableCores: 0"] == [lines[n].split(", ")[3] for n in (1, 3)]


def test_cards_of_one_board_hang_below_a_switch() -> None:
    """As Gaia counts them where NVML says that the board has several."""
    pair = Topology(gpus=FOUR.gpus[:2], links=(Link(a=FOUR.gpus[0].id, b=FOUR.gpus[1].id, pcie=PcieClass.PSB),))
    names = [line.partition(" (")[0] for line in graph(node(machine=pair)).splitlines()]

    assert ["ROOT:2", "|---PIX", "|   |---GPU0", "|   |---GPU1"] == names


def test_a_node_without_gpus_is_a_root_alone() -> None:
    assert "ROOT:0\n" == graph(node(machine=Topology()))


def test_usage_is_told_by_pod_container_and_card() -> None:
    state = node(
        held(1, "GPU-0", "GPU-1", of=owner("train"), uid=UIDS[0]),
        held(2, "GPU-2::0", of=owner("infer", "serve"), uid=UIDS[1], resource=SHARED),
        held(3, "GPU-3", of=None),
    )

    found = usages_of(FOUR, attribute_use(state, measurement(*USED)))

    assert {UIDS[0], UIDS[1]} == found.keys()
    train, infer = found[UIDS[0]], found[UIDS[1]]
    first, second = train["stat"]["main"]["dev"]
    assert ["00000000:07:00.0", "0", 40.0, 1024.0, [72], 81920.0] == [*first.values()]
    assert ["1", 0.0, 0.0, []] == [second[field] for field in ("card_idx", "gpu", "mem", "pids")]
    assert ("ml", {"gpu": 2.0, "mem": 163840.0}) == (train["project"], train["spec"]["main"])
    assert ["serve"] == [*infer["stat"]]
    assert {"serve": {"gpu": 0.0, "mem": 0.0}} == infer["spec"]


@pytest.mark.parametrize(
    ("pci", "expected"),
    [("0000:0a:00.0", "00000000:0A:00.0"), ("10000:e1:00.0", "00010000:E1:00.0"), (None, "")],
)
def test_a_bus_id_has_the_form_of_nvml(pci: str | None, expected: str) -> None:
    assert expected == bus_id(pci)
