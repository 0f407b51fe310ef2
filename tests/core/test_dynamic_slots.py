"""Slots that become MIG instances: which GPU, what a container holds, and that no place is promised twice."""

from collections.abc import Sequence

import msgspec
import pytest
from decision_support import node, pod
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from instance_support import A100, GIB, place
from slot_support import MIB, asks, given, in_slots
from unit_support import BEST, DGX, KUBELET, admitted, refused

from topoalign.core.admission.admit import admit
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.processes import DeviceUse, GpuProcess, Measurement
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.mig import MigDevice, MigPlacement
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import Parts, partitioning_by_gpu
from topoalign.core.state.share_amounts import equal_part, offered_in_slots
from topoalign.core.usage.attribution import attribute_use

BOTH = [BEST, KUBELET]


def machine(gpus: int = 1, *instances: MigPlacement | None) -> Topology:
    """The first GPUs of the machine in MIG mode as an A100 of 40 GiB; the first of them with these instances."""
    mig = tuple(
        MigDevice(
            uuid=DeviceID(f"MIG-{number}"), profile="x", gpu_instance=number, compute_instance=0, memory=1, placement=at
        )
        for number, at in enumerate(instances)
    )
    divided = tuple(
        msgspec.structs.replace(gpu, mig=mig if not number else (), mig_profiles=A100)
        for number, gpu in enumerate(DGX.gpus[:gpus])
    )
    topology = msgspec.structs.replace(DGX, gpus=(*divided, *DGX.gpus[gpus:]))
    return in_slots(topology, 7, gpus, Slots(instances=True)) if not instances else offered(topology, gpus)


def offered(topology: Topology, gpus: int) -> Topology:
    """The same, where the instances are not offered, but their GPUs in slots."""
    plain = in_slots(msgspec.structs.replace(topology, gpus=DGX.gpus), 7, gpus, Slots(instances=True))
    return msgspec.structs.replace(topology, offers=plain.offers)


def held(state: NodeState, *amounts: int, made: Sequence[str] = ()) -> NodeState:
    """The node with slots of the first GPU held by so many GiB each; the first ones have these instances."""
    for number, gib in enumerate(amounts):
        slot = DeviceID(f"{state.hardware.gpus[0].id}::{number}")
        allocation = Allocation(
            id=AllocationID(f"held-{number}"),
            devices={GPU: (slot,)},
            slots={slot: Amount(cores=15, memory=gib * GIB)},
            instances={slot: DeviceID(made[number])} if number < len(made) else {},
        )
        state = state.apply(
            AllocationGranted(node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=allocation)
        )
    return state


@pytest.mark.parametrize("rules", BOTH)
def test_a_container_holds_the_smallest_profile_with_enough(rules: AdmissionRules) -> None:
    state = node(machine())

    found = [
        given(state, admitted(state, pod(asks(memory=gib * 1024, cores=1)), rules)[0])[0] for gib in (1, 6, 11, 21)
    ]

    assert [(15, 5 * 1024), (29, 10 * 1024), (43, 20 * 1024), (100, 40 * 1024)] == found


@pytest.mark.parametrize("rules", BOTH)
def test_all_memory_or_all_cores_are_the_largest_profile(rules: AdmissionRules) -> None:
    state = node(machine())

    for container in (asks(), asks(percentage=100), asks(cores=100, memory=1)):
        assert {0: (100, 40 * 1024)} == given(state, admitted(state, pod(container), rules)[0])


@pytest.mark.parametrize("rules", BOTH)
def test_a_place_and_not_the_sum_decides(rules: AdmissionRules) -> None:
    """20 GiB are free in the sum, and no run of four slices is."""
    state = node(machine(1, place(1, 1), place(5, 1)))

    code = refused(state, pod(asks(memory=11 * 1024)), rules).code

    assert code in ("NotEnoughShareMemory", "NotEnoughShareGpus")
    assert {0: (29, 10 * 1024)} == given(state, admitted(state, pod(asks(memory=6 * 1024)), rules)[0])


def test_where_the_place_of_an_instance_is_not_known_nothing_is_to_be_had() -> None:
    state = node(machine(1, None))

    assert not any(slot.startswith(DGX.gpus[0].id) for slot in state.healthy(GPU))


def test_what_is_reserved_has_a_place_and_its_instance_counts_once() -> None:
    reserved = held(node(machine()), 20)
    made = held(node(machine(1, place(4, 4))), 20, made=["MIG-0"])

    left = [state.ownership.slots_left[DGX.gpus[0].id] for state in (reserved, made)]

    assert [frozenset({place(4, 4)})] * 2 == [each.taken for each in left]
    assert [Amount(cores=58, memory=20 * GIB)] * 2 == [each.left for each in left]


def test_a_gpu_without_a_free_place_lists_its_free_slots_unhealthy() -> None:
    state = held(node(machine()), 40)

    healthy = {slot for slot in state.healthy(GPU) if slot.startswith(DGX.gpus[0].id)}

    assert {f"{DGX.gpus[0].id}::0"} == healthy


def test_without_an_amount_a_slot_is_the_smallest_profile() -> None:
    topology = machine()

    assert Amount(cores=15, memory=5 * GIB) == equal_part(topology, DGX.gpus[0].id)
    assert Amount(cores=100, memory=40 * GIB) == offered_in_slots(topology)[DGX.gpus[0].id]


def test_what_is_left_is_the_largest_instance_that_can_be_made() -> None:
    state = held(node(machine(1, place(4, 4))), 20, made=["MIG-0"])

    division = partitioning_by_gpu(state)[DGX.gpus[0].id]

    assert ("MIG", "slots") == division.ways
    assert Parts(slots=6, cores=58, memory=20 * GIB) == division.left
    assert Parts() == partitioning_by_gpu(held(state, 20, 20))[DGX.gpus[0].id].left


def test_processes_in_an_instance_are_of_the_container_with_its_slot() -> None:
    state = held(node(machine(1, place(4, 4))), 20, made=["MIG-0"])
    process = GpuProcess(pid=7, kinds=("compute",), memory=5)
    measured = Measurement(
        node=state.node, time=1.0, devices=(DeviceUse(device=DeviceID("MIG-0"), processes=(process,)),)
    )

    found = {each.device: each for each in attribute_use(state, measured).devices}

    assert [("held-0",)] == [each.allocations for each in found[DeviceID("MIG-0")].holders]
    assert () == found[DGX.gpus[0].id].holders


places = st.sampled_from(sorted({at for each in A100 for at in each.placements}, key=lambda at: (at.start, at.size)))


@settings(max_examples=60)
@drawn(st.lists(places, max_size=4), st.lists(st.integers(1, 40), max_size=5), st.sampled_from(BOTH))
def test_pods_are_admitted_while_there_is_a_place(
    there: list[MigPlacement], asked: list[int], rules: AdmissionRules
) -> None:
    """Compared with slices that are marked one by one, for each profile from the smallest and each start."""
    used, instances = set[int](), list[MigPlacement]()
    for at in there:
        if not used & {*range(at.start, at.start + at.size)}:
            used |= {*range(at.start, at.start + at.size)}
            instances.append(at)
    state = node(machine(1, *instances))

    for number, gib in enumerate(asked):
        container = asks(memory=gib * 1024, cores=1)
        decision = admit(state, pod(container, name=f"p{number}"), rules)
        expected = None
        for each in sorted(A100, key=lambda each: (each.memory, each.slices)):
            free = [at for at in each.placements if not used & {*range(at.start, at.start + at.size)}]
            if each.memory >= gib * GIB and free:
                expected = each, (max if each.name[0] in "13" else min)(free, key=lambda at: at.start)
                break
        assert isinstance(decision, Admission) == (expected is not None), decision
        if isinstance(decision, Admission) and expected is not None:
            profile, at = expected
            assert {0: (profile.cores, profile.memory // MIB)} == given(state, decision.allocations[0])
            used |= {*range(at.start, at.start + at.size)}
            (allocation,) = decision.allocations
            taken = msgspec.structs.replace(
                allocation, id=AllocationID(f"a{number}"), instances=dict.fromkeys(allocation.slots, f"made-{number}")
            )
            state = made_on(state, at, f"made-{number}", taken)


def made_on(state: NodeState, at: MigPlacement, uuid: str, allocation: Allocation) -> NodeState:
    """The instance has been made, discovery has seen it, and the allocation has it."""
    first, *rest = state.hardware.gpus
    made = MigDevice(uuid=DeviceID(uuid), profile="x", gpu_instance=20, compute_instance=0, memory=1, placement=at)
    topology = msgspec.structs.replace(
        state.hardware, gpus=(msgspec.structs.replace(first, mig=(*(first.mig or ()), made)), *rest)
    )
    after = node(topology)
    for each in (*state.allocations.values(), allocation):
        after = after.apply(AllocationGranted(node=after.node, epoch=after.epoch, seq=after.seq + 1, allocation=each))
    return after
