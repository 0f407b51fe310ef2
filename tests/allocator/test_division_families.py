"""/metrics of a node tells what is given of each GPU and what is left of it, measured or not."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
import slot_support
from decision_support import node
from unit_support import CORES, DGX, MEMORY, holds, in_units
from use_support import GIB, INSTANCES, MACHINE, NODE, TRAIN, UIDS, Node, held

from topoalign.allocator.metrics.use_families import (
    Amounts,
    Family,
    GpuUsage,
    gpu_usages,
    hami_partition_families,
    own_partition_families,
)
from topoalign.allocator.metrics.use_series import UseSeries
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.events import (
    AllocationGranted,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    TopologyDiscovered,
)
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import GpuPartitioning, partitioning_by_gpu

GPU0 = DGX.gpus[0].id
SIZE = DGX.gpus[0].memory or 0


def first(state: NodeState) -> GpuUsage:
    return gpu_usages(partitioning_by_gpu(state), state.hardware)[0]


def ids(letter: str, count: int) -> tuple[DeviceID, ...]:
    return tuple(DeviceID(f"{GPU0}::{letter}{n}") for n in range(count))


def samples(families: list[Family]) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    return {
        family.name: {frozenset(at.items()): value for at, value in family.samples if value is not None}
        for family in families
    }


def test_units_are_told_as_amounts_that_are_given_and_left() -> None:
    """20 hundredths and 4 blocks of a GPU of which 80 and all other blocks are left."""
    found = first(holds(node(in_units(DGX)), "a", {CORES: ids("c", 20), MEMORY: ids("m", 4)}))

    assert (1, Amounts(20, 4 * MEMORY_BLOCK, None)) == (found.containers, found.asked)
    assert Amounts(80, SIZE - 4 * MEMORY_BLOCK, None) == found.left


def test_who_has_all_units_of_computing_time_has_all_memory() -> None:
    """Nothing of such a GPU is left, although nobody holds its blocks, or only some of them."""
    found = first(holds(node(in_units(DGX)), "a", {CORES: ids("c", 100), MEMORY: ids("m", 4)}))

    assert (Amounts(100, SIZE, None), Amounts(0, 0, None)) == (found.asked, found.left)


def test_no_more_memory_is_given_than_a_gpu_has() -> None:
    """The halves of a container count as two while their owner is not known: all memory, and 4 blocks of it once more."""
    state = node(in_units(DGX))
    for name, resource, units in (("a", CORES, ids("c", 100)), ("b", MEMORY, ids("m", 4))):
        half = Allocation(id=AllocationID(name), devices={resource: units})
        event = AllocationGranted(node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=half)
        state = state.apply(event)
    found = first(state)

    assert (2, Amounts(100, SIZE, None)) == (found.containers, found.asked)


def test_a_whole_gpu_is_left_or_given_as_a_whole() -> None:
    plain = node(DGX)

    assert (Amounts(0, 0, None), Amounts(100, SIZE, None)) == first(plain)[3:]
    assert (Amounts(100, SIZE, None), Amounts(0, 0, None)) == first(holds(plain, "a", {GPU: (GPU0,)}))[3:]


def in_slots() -> Topology:
    offer = Offer(resource=GPU, devices=(GPU0,), replicas=10, slots=Slots())
    return msgspec.structs.replace(DGX, offers=(offer,))


def test_slots_are_told_with_their_amounts() -> None:
    """Two slots: one recorded with 40 cores and 6 GiB, one that counts as a tenth of the GPU."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("a"), container=ContainerName("main"))
    slots = (DeviceID(f"{GPU0}::0"), DeviceID(f"{GPU0}::1"))
    state = node(in_slots())
    allocation = Allocation(
        id=AllocationID("a"), owner=owner, devices={GPU: slots}, slots={slots[0]: Amount(cores=40, memory=6 * GIB)}
    )
    found = first(
        state.apply(AllocationGranted(node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=allocation))
    )
    given = 6 * GIB + SIZE // 10

    assert Amounts(50, given, 2) == found.asked
    assert Amounts(50, SIZE - given, 8) == found.left


def test_time_slices_are_counted_and_have_no_amounts() -> None:
    slices = Offer(resource=ResourceName("nvidia.com/gpu.shared"), devices=(GPU0,), replicas=4)
    state = node(msgspec.structs.replace(DGX, offers=(slices,)))
    found = first(holds(state, "a", {slices.resource: (DeviceID(f"{GPU0}::3"),)}))

    assert (Amounts(None, None, 1), Amounts(None, None, 3)) == (found.asked, found.left)


def test_instances_are_told_by_their_memory_and_not_by_time() -> None:
    """One of the two instances of the third GPU is held."""
    offer = Offer(resource=GPU, devices=tuple(each.uuid for each in INSTANCES))
    state = holds(node(msgspec.structs.replace(MACHINE, offers=(offer,))), "a", {GPU: (INSTANCES[1].uuid,)})
    found = gpu_usages(partitioning_by_gpu(state), state.hardware)[2]

    assert (Amounts(None, 10 * GIB, None), Amounts(None, 10 * GIB, None)) == (found.asked, found.left)


def test_what_has_no_amount_has_no_sample_under_our_names() -> None:
    state = node(in_units(DGX))
    found = samples(list(own_partition_families(gpu_usages(partitioning_by_gpu(state), state.hardware)[:1])))
    gpu = frozenset({"gpu_uuid": GPU0, "mig_uuid": ""}.items())

    assert {
        "topoalign_gpu_containers": {gpu: 0},
        "topoalign_gpu_memory_asked_bytes": {gpu: 0},
        "topoalign_gpu_memory_left_bytes": {gpu: SIZE},
        "topoalign_gpu_time_asked_ratio": {gpu: 0},
        "topoalign_gpu_time_left_ratio": {gpu: 1},
        "topoalign_gpu_slots_asked": {},
        "topoalign_gpu_slots_left": {},
    } == found


@pytest.mark.parametrize(("offered", "percent"), [(100, 33), (150, 22), (0, None)], ids=["plain", "scaled", "none"])
def test_under_the_names_of_hamis_scheduler_percent_is_of_what_is_offered(offered: int, percent: int | None) -> None:
    """33 cores of 150 are 22 percent; its ratio of memory is one."""
    gpu, none = DGX.gpus[0], Amounts(0, 0, 0)
    row = GpuUsage(gpu, 2, Amounts(offered, 80 * GIB, 10), Amounts(33, 20 * GIB, 2), none)
    found = samples(list(hami_partition_families([row], NodeName("node-1"))))
    short = {"node": "node-1", "device_uuid": GPU0, "device_index": str(gpu.index)}
    at = frozenset({**short, "device_type": gpu.name}.items())

    assert ({} if percent is None else {at: percent}) == found["hami_gpu_core_allocated_ratio"]
    assert ({} if percent is None else {at: 100}) == found["hami_gpu_core_limit_ratio"]
    assert {at: 80 * GIB} == found["hami_gpu_memory_limit_bytes"]
    assert {at | {("device_cores", str(offered))}: 20 * GIB} == found["hami_gpu_memory_allocated_bytes"]
    assert ({at: 2}, {frozenset(short.items()): 0.25}) == (
        found["hami_gpu_shared_count"],
        found["hami_node_gpu_memory_allocated_ratio"],
    )


@pytest.mark.anyio
async def test_gpus_are_counted_anew_when_what_is_there_held_or_healthy_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for what the kubelet says of its containers, nor for the same hardware."""
    counted = list[NodeState]()

    def counts(state: NodeState) -> Mapping[DeviceID, GpuPartitioning]:
        counted.append(state)
        return partitioning_by_gpu(state)

    monkeypatch.setattr("topoalign.core.state.gpu_partitioning.partitioning_by_gpu", counts)
    allocator = Node(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    ledger, bus = allocator.ledger, allocator.bus
    series = UseSeries(ledger, bus, ())
    fewer = msgspec.structs.replace(MACHINE, gpus=MACHINE.gpus[:2])
    found = TopologyDiscovered(node=NODE, epoch=1, revision=2, boot_id="boot", source="nvml", topology=fewer)
    ill = {DeviceID("GPU-1"): DeviceHealth(state=HealthState.UNHEALTHY)}
    judged = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=ill)

    async def is_counted(change: Callable[[], object]) -> bool:
        change()
        before = len(counted)
        pages = [b"".join([chunk async for chunk in each.write()]) for each in (series, UseSeries(ledger, bus, ()))]
        assert pages[0] == pages[1]
        return len(counted) - before == 2

    assert [True, True, True, False, False, True] == [
        await is_counted(lambda: None),
        await is_counted(lambda: ledger.take_reading(judged)),
        await is_counted(lambda: ledger.take_reading(found)),
        await is_counted(lambda: ledger.take_reading(msgspec.structs.replace(found, revision=3))),
        await is_counted(lambda: ledger.observe(containers=())),
        await is_counted(lambda: ledger.release((AllocationID("a-1"),), "released")),
    ]


def test_a_slot_left_by_an_init_container_is_given_once() -> None:
    """With the larger of both amounts, as it counts for what is left."""
    slot, owner = DeviceID("GPU-0::3"), msgspec.structs.replace(TRAIN, container=ContainerName("prepare"))
    init = held(1, slot, of=owner, uid=UIDS[0], resource=GPU)
    app = held(2, slot, of=TRAIN, uid=UIDS[0], resource=GPU)
    init = msgspec.structs.replace(init, role="init", slots={slot: Amount(cores=60, memory=20 * GIB)})
    app = msgspec.structs.replace(app, slots={slot: Amount(cores=30, memory=50 * GIB)})
    it = Node()
    it.ledger.take_reading(
        TopologyDiscovered(
            node=NODE, epoch=2, revision=1, boot_id="b", source="nvml", topology=slot_support.in_slots(MACHINE)
        )
    )
    it.ledger.grant((init, app))
    found = first(it.ledger.state)
    assert Amounts(60, 50 * GIB, 1) == found.asked
