"""/metrics of a node tells what is given of a GPU where an init container left some of it to later containers."""

import pytest
from decision_support import NODE, node
from slot_support import MIB, in_slots
from unit_support import CORES, DGX, MEMORY, holds, in_units

from topoalign.allocator.metrics.use_families import Amounts, GpuUsage, gpu_usages
from topoalign.core.model.allocations import Allocation, Owner, Role
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu

GPU0 = DGX.gpus[0].id
SIZE = DGX.gpus[0].memory or 0


def first(state: NodeState) -> GpuUsage:
    return gpu_usages(partitioning_by_gpu(state), state.hardware)[0]


def units(cores: range, blocks: int = 0, begin: int = 0) -> dict[ResourceName, tuple[DeviceID, ...]]:
    time = tuple(DeviceID(f"{GPU0}::c{n}") for n in cores)
    memory = tuple(DeviceID(f"{GPU0}::m{n}") for n in range(begin, begin + blocks))
    return {name: some for name, some in ((CORES, time), (MEMORY, memory)) if some}


def given(
    state: NodeState,
    container: str,
    devices: dict[ResourceName, tuple[DeviceID, ...]],
    role: Role = "init",
    slots: dict[DeviceID, Amount] | None = None,
) -> NodeState:
    """The node after this container of the pod ml/train got these devices."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName(container))
    record = AllocationID(f"{container}-{len(state.allocations)}")
    allocation = Allocation(id=record, owner=owner, role=role, devices=devices, slots=slots or {})
    return state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=allocation))


def test_all_memory_is_given_where_an_init_container_had_all_time() -> None:
    """Nothing is left for others while its record lives, so what is asked and what is left are the GPU."""
    prepared = given(node(in_units(DGX)), "prepare", units(range(100)))
    one = first(given(prepared, "main", units(range(50), 40), "app"))
    all_taken = given(given(prepared, "main", units(range(50), 40), "app"), "side", units(range(50, 100), 9, 40), "app")

    assert (Amounts(100, SIZE, None), Amounts(0, 0, None)) == (one.asked, one.left)
    assert (Amounts(100, SIZE, None), Amounts(0, 0, None)) == (first(all_taken).asked, first(all_taken).left)


def test_two_containers_with_half_of_the_time_were_given_their_blocks() -> None:
    """Of the rest nothing is left, because a share needs both; but nobody was given it."""
    state = holds(node(in_units(DGX)), "a", units(range(50), 10))
    two_pods = first(holds(state, "b", units(range(50, 100), 10, 10)))
    of_one = given(
        given(node(in_units(DGX)), "a", units(range(50), 10), "app"), "b", units(range(50, 100), 10, 10), "app"
    )

    for found in (two_pods, first(of_one)):
        assert (Amounts(100, 20 * MEMORY_BLOCK, None), Amounts(0, 0, None)) == (found.asked, found.left)


def test_units_that_a_container_has_by_two_records_are_not_all_time() -> None:
    state = given(node(in_units(DGX)), "main", units(range(50), 4), "app")
    found = first(given(state, "main", units(range(50), 4), "app"))

    assert (Amounts(50, 4 * MEMORY_BLOCK, None), 1) == (found.asked, found.containers)


def test_a_slot_with_all_time_has_its_memory_alone() -> None:
    slot = DeviceID(f"{GPU0}::3")
    state = node(in_slots(DGX))
    cases: tuple[tuple[str, Role, int, int], ...] = (("prepare", "init", 100, 4096), ("main", "app", 0, 2048))
    for name, role, cores, memory in cases:
        state = given(state, name, {GPU: (slot,)}, role, {slot: Amount(cores=cores, memory=memory * MIB)})

    assert Amounts(100, 4096 * MIB, 1) == first(state).asked


@pytest.mark.parametrize(("taken", "expected"), [(60, 1), (30, 2)], ids=["all", "some"])
def test_an_init_container_without_anything_alone_holds_nothing(taken: int, expected: int) -> None:
    state = given(node(in_units(DGX)), "prepare", units(range(60), 8))

    assert 1 == first(state).containers
    assert expected == first(given(state, "main", units(range(taken), 8), "app")).containers
