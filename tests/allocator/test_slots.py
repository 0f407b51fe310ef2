"""Slots of GPUs over the kubelet's protocol: what a container holds, with and without a reservation."""

import pytest
from slot_node_support import EACH, MACHINE, SLOTS, Ask, SlotNode
from slot_support import MIB, WITH_NUMA_NODES, in_mig_mode

from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.requests import Policy
from topoalign.core.sharing.share_refusals import NotEnoughShareMemory, ShareSplit
from topoalign.core.state.node_reservations import NodeReservations

pytestmark = pytest.mark.anyio

PART = Amount(cores=100 // SLOTS, memory=EACH // SLOTS * MIB)


def refused(decision: Decision) -> str:
    assert isinstance(decision, Refusal), decision
    return decision.finding


async def test_a_reserved_container_holds_its_amounts() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(2, memory=6_000, cores=40), Ask(memory=9_000))
        it.reserve(pod)

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        assert [Amount(cores=40, memory=6_000 * MIB)] * 2 == [*it.held("a").values()]
        assert [Amount(cores=0, memory=9_000 * MIB)] == [*it.held("a", "c1").values()]


async def test_without_a_reservation_a_slot_is_an_equal_part() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(memory=15_000, cores=80))

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        assert [PART] == [*it.held("a").values()]


async def test_what_is_reserved_for_others_is_spared() -> None:
    async with SlotNode.running() as (it, _):
        reserved = it.asking("later", Ask(2, cores=95))
        it.reserve(reserved)
        (gpus,) = (each.containers[0].devices[GPU] for each in it.reserved.reservations)

        assert isinstance(await it.admit_pod(it.asking("now", Ask(1, memory=1))), Admission)

        taken = {slot.partition("::")[0] for slot in it.slots_of("now")["c0"]}
        assert taken.isdisjoint(slot.partition("::")[0] for slot in gpus)
        assert isinstance(await it.admit_pod(reserved), Admission)
        await it.check(["later", "now"])


async def test_what_a_gpu_has_not_left_is_refused() -> None:
    """The kubelet need not take what is preferred."""
    async with SlotNode.running() as (it, _):
        first = it.asking("a", Ask(cores=95, memory=100))
        it.reserve(first)
        assert isinstance(await it.admit_pod(first), Admission)
        await it.check(["a"])
        (gpu,) = it.held("a")
        it.forced = {GPU: [DeviceID(f"{gpu}::7")]}

        found = refused(await it.admit_pod(it.asking("b", Ask(1))))

        assert "12 cores" in found
        assert "left is 5" in found
        await it.check(["a"])


async def test_a_whole_gpu_is_not_given_beside_memory_of_another() -> None:
    """Who has memory alone has no cores that would be lacking; the kubelet need not take what is reserved."""
    async with SlotNode.running() as (it, _):
        memory, whole = it.asking("a", Ask(memory=100)), it.asking("b", Ask(cores=100))
        it.reserve(memory)
        assert isinstance(await it.admit_pod(memory), Admission)
        await it.check(["a"])
        (gpu,) = it.held("a")
        it.reserve(whole)
        it.forced = {GPU: [DeviceID(f"{gpu}::7")]}

        assert "100 cores" in refused(await it.admit_pod(whole))
        await it.check(["a"])


async def test_a_record_that_has_ended_makes_room() -> None:
    async with SlotNode.running() as (it, _):
        first = it.asking("a", Ask(4, cores=95, memory=100))
        it.reserve(first)
        assert isinstance(await it.admit_pod(first), Admission)
        await it.check(["a"])
        await it.drop("a")
        it.forced = {GPU: [DeviceID("GPU-2::7")]}  # the kubelet's checkpoint still has the slots of a

        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.check(["b"])


async def test_two_slots_of_one_gpu_are_refused() -> None:
    async with SlotNode.running() as (it, _):
        it.forced = {GPU: [DeviceID("GPU-1::0"), DeviceID("GPU-1::5")]}

        assert "several slots of 'GPU-1'" in refused(await it.admit_pod(it.asking("a", Ask(2))))


async def test_a_spent_gpu_lists_its_free_slots_as_unhealthy() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(cores=100))
        it.reserve(pod)
        assert isinstance(await it.admit_pod(pod), Admission)
        await it.listed()

        healthy = {*it.kubelet.state().healthy(GPU)}
        (mine,) = it.slots_of("a")["c0"]
        assert {mine} == {slot for slot in healthy if slot.startswith(mine.partition("::")[0])}
        await it.remove("a")
        assert 4 * SLOTS == len({*it.kubelet.state().healthy(GPU)})


async def test_slots_of_mig_instances_are_held_and_told_as_instances() -> None:
    """With a reservation by its amounts, without one as equal parts; the container is told of the instance."""
    machine = in_mig_mode(MACHINE, *([4_096, 8_192] for _ in MACHINE.gpus))
    async with SlotNode.running(machine=machine) as (it, _):
        pod = it.asking("a", Ask(2, percentage=50, cores=40))
        it.reserve(pod)
        assert isinstance(await it.admit_pod(pod), Admission)
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.check(["a", "b"])

        held, sizes = it.held("a"), {each.uuid: each.memory for gpu in machine.gpus for each in gpu.mig or ()}
        assert {uuid: Amount(cores=40, memory=sizes[uuid] // 2) for uuid in held} == held
        assert [True] == [amount.cores == 100 // SLOTS for amount in it.held("b").values()]
        (gpus,) = {each.parents[instance] for each in it.records("b") for instance in it.held("b")}
        assert gpus.startswith("GPU-")


async def test_an_init_container_leaves_its_slot() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(2, memory=3_000), init=[Ask(1, memory=9_000, cores=50)])
        it.reserve(pod)

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        held = sorted(it.held("a", "c1").values(), key=lambda each: each.cores)
        assert [Amount(cores=0, memory=3_000 * MIB), Amount(cores=50, memory=9_000 * MIB)] == held


async def test_a_container_that_is_admitted_again_holds_its_own() -> None:
    """The kubelet is killed before its checkpoint has the first of two containers, and asks for both anew."""
    async with SlotNode.running() as (it, tasks):
        pod = it.asking("a", Ask(memory=2_000), Ask(memory=9_000))
        it.reserve(pod)
        (first, second) = (each.devices[GPU] for each in it.reserved.reservations[0].containers)
        await it.allocations.allocate(GPU, [first])  # the kubelet is gone before it notes the answer
        await it.start_agent(tasks)

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        assert {"c0": [*first], "c1": [*second]} == it.slots_of("a")
        assert [2_000 * MIB] == [each.memory for each in it.held("a").values()]
        assert [9_000 * MIB] == [each.memory for each in it.held("a", "c1").values()]


async def test_a_slot_that_is_held_is_not_preferred_for_its_reservation() -> None:
    """
    Another pod has the slot that was reserved for a container, which got its neighbour's; neither has started. A kubelet
    that has lost its checkpoint takes all slots for free; the one that is held is not named while there are others.
    """
    async with SlotNode.running() as (it, _):
        pod = it.asking("reserved", Ask(cores=60, memory=2_000), Ask(cores=30, memory=5_000))
        it.reserve(pod)
        (slot,) = it.reserved.reservations[0].containers[0].devices[GPU]
        it.forced = {GPU: [slot]}
        assert isinstance(await it.kubelet.admit(it.asking("other", Ask()), "uid-other", start=False), Admission)
        await it.check(["other"])
        it.forced = {}
        assert isinstance(await it.kubelet.admit(pod, "uid-reserved", start=False), Admission)
        await it.check(["other", "reserved"])
        await it.restart_kubelet(knowing=False)

        preferred = await it.allocations.prefer(GPU, [*it.kubelet.state().healthy(GPU)], [], 1)

        held = {each for one in it.ledger.state.allocations.values() for each in one.device_ids}
        assert slot in held
        assert held.isdisjoint(preferred)


async def test_amounts_outlive_a_restart_and_a_lost_journal_makes_equal_parts() -> None:
    async with SlotNode.running() as (it, tasks):
        pod = it.asking("a", Ask(memory=7_000, cores=20))
        it.reserve(pod)
        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        await it.start_agent(tasks)
        await it.check(["a"])
        kept = [*it.held("a").values()]
        it.journal = type(it.journal)()
        await it.start_agent(tasks)
        await it.check(["a"])

        assert [Amount(cores=20, memory=7_000 * MIB)] == kept
        assert [PART] == [*it.held("a").values()]


async def test_a_pod_with_a_list_of_uuids_gets_one_of_these() -> None:
    async with SlotNode.running() as (it, tasks):
        beside = it.asking("beside", Ask(2, memory=8_000))
        pod = it.asking(
            "a", Ask(memory=7_000), Ask(memory=7_000), annotations={"nvidia.com/use-gpuuuid": "GPU-3,GPU-9"}
        )
        it.reserve(beside, pod, beside=True)

        assert isinstance(await it.admit_pod(beside), Admission)
        await it.start_agent(tasks)
        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a", "beside"])

        assert {"GPU-3": Amount(cores=0, memory=7_000 * MIB)} == it.held("a") == it.held("a", "c1")
        assert {"GPU-0", "GPU-1"} == it.held("beside").keys()


@pytest.mark.parametrize(
    "annotations",
    [{"nvidia.com/use-gpuuuid": "GPU-2"}, {"hami.io/gpu-scheduler-policy": "mutex"}],
    ids=["uuid", "mutex"],
)
async def test_a_pod_that_limits_its_gpus_is_refused_if_aligned_elsewhere(annotations: dict[str, str]) -> None:
    """What filled the first NUMA node ends before the pod is admitted, and its kubelet aligns it to that."""
    async with SlotNode.running(Policy.SINGLE_NUMA_NODE, terms=WITH_NUMA_NODES) as (it, _):
        full = it.asking("full", Ask(2, cores=100))
        it.reserve(full)
        assert isinstance(await it.admit_pod(full), Admission)
        await it.check(["full"])
        pod = it.asking("a", Ask(memory=7_000), annotations=annotations)
        assert isinstance(it.reserve(pod)[0], Admission)
        await it.remove("full")

        assert "accepts 'GPU-2'" in refused(await it.admit_pod(pod))
        await it.check([])


async def test_a_container_with_its_init_containers_gpu_gets_no_other_one() -> None:
    """The kubelet keeps the slot that is taken over, and need not take the other one that is preferred."""
    async with SlotNode.running() as (it, _):
        lists = {"nvidia.com/use-gpuuuid": "GPU-0,GPU-1"}
        pod = it.asking("a", Ask(2, memory=3_000), init=[Ask(1, memory=9_000)], annotations=lists)
        it.reserve(pod)
        taken, other = (each.devices[GPU] for each in it.reserved.reservations[0].containers)
        await it.allocations.allocate(GPU, [taken])

        with pytest.raises(ShareSplit, match="accepts 'GPU-0', 'GPU-1'"):
            await it.allocations.allocate(GPU, [(*taken, DeviceID("GPU-3::0"))])
        await it.allocations.allocate(GPU, [other])


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
async def test_containers_that_are_aligned_elsewhere_hold_what_they_asked_for(policy: Policy) -> None:
    """What filled the first NUMA node ends between the bind and the admission, and the kubelet aligns them to that."""
    async with SlotNode.running(policy, terms=WITH_NUMA_NODES) as (it, _):
        full = it.asking("full", Ask(2, cores=100))
        it.reserve(full)
        assert isinstance(await it.admit_pod(full), Admission)
        await it.check(["full"])
        pod = it.asking("a", Ask(memory=7_000, cores=5), Ask(memory=9_100, cores=60), Ask(memory=7_000, cores=5))
        it.reserve(pod)
        await it.remove("full")

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])

        assert {"GPU-0": Amount(cores=5, memory=7_000 * MIB)} == it.held("a", "c0")
        assert {"GPU-0": Amount(cores=60, memory=9_100 * MIB)} == it.held("a", "c1")
        assert {"GPU-1": Amount(cores=5, memory=7_000 * MIB)} == it.held("a", "c2")


async def test_a_container_that_is_aligned_to_gpus_without_room_is_refused() -> None:
    """Others have come to the GPUs that its kubelet aligns it to now; an equal part would be less than it asked for."""
    async with SlotNode.running(Policy.SINGLE_NUMA_NODE, terms=WITH_NUMA_NODES) as (it, _):
        full = it.asking("full", Ask(2, cores=100))
        it.reserve(full)
        assert isinstance(await it.admit_pod(full), Admission)
        await it.check(["full"])
        pod = it.asking("a", Ask(memory=9_000))
        assert isinstance(it.reserve(pod)[0], Admission)
        reserved = it.reserved
        await it.remove("full")
        others = it.asking("others", Ask(2, memory=9_000))
        it.reserve(others)
        assert isinstance(await it.admit_pod(others), Admission)
        it.reserved = reserved

        decision = await it.admit_pod(pod)

        assert isinstance(decision, Refusal)
        assert NotEnoughShareMemory.code in decision.finding
        await it.check(["others"])


async def test_slots_taken_without_a_question_are_of_the_container_that_waits() -> None:
    """A kubelet that offers no more than it needs does not ask what is preferred, and an agent may start in between."""
    async with SlotNode.running() as (it, tasks):
        pod = it.asking("a", Ask(memory=7_000), Ask(memory=9_100))
        it.reserve(pod)
        (own, second) = (each.devices[GPU] for each in it.reserved.reservations[0].containers)
        offered = [slot for slot in it.machine.devices[GPU] if slot.startswith("GPU-3")]
        told = await it.allocations.prefer(GPU, offered, (), 1)
        await it.start_agent(tasks)

        (first,) = await it.allocations.allocate(GPU, [told])
        (other,) = await it.allocations.allocate(GPU, [second])

        assert {*told}.isdisjoint({*own, *second})
        assert [7_000 * MIB, 9_100 * MIB] == [
            amount.memory for each in (first, other) for amount in each.slots.values()
        ]


async def test_a_displaced_container_holds_its_amounts_again() -> None:
    """The kubelet has lost its checkpoint and gives the slot to another container, which ends."""
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(memory=9_000, cores=60))
        it.reserve(pod)
        assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a"])
        it.reserved, held = NodeReservations(), it.held("a")
        await it.restart_kubelet(knowing=False)
        it.forced = {GPU: [*it.records("a")[0].device_ids]}
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.allocations.reconcile()
        assert [] == it.records("a") and ["a"] == [each.owner.pod for each in it.records("b")[0].displaced]
        it.forced = {}

        await it.remove("b")

        assert held == it.held("a")
