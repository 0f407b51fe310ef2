"""MIG instances in slots: which a container gets, what it holds of each, and what is left of the GPU."""

from collections.abc import Mapping

import msgspec
import pytest
from decision_support import node, pod
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from slot_support import MIB, asks, holding, in_mig_mode, in_slots
from unit_support import BEST, DGX, KUBELET, admitted

from topoalign.core.admission.admit import admit
from topoalign.core.admission.feasibility import machine_key
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.choosers import link_scorer, shareable_devices
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import Parts, partitioning_by_gpu
from topoalign.core.state.share_amounts import equal_part, offered_in_slots

BOTH = [BEST, KUBELET]
SLOTS = 3
MACHINE = in_slots(in_mig_mode(DGX, [4_864, 9_856], [4_864]), SLOTS, 2)
"""GPU 0 has instances of 4864 and 9856 MiB, GPU 1 one of 4864."""
MEMORY = {"MIG-0-0": 4_864, "MIG-0-1": 9_856, "MIG-1-0": 4_864}


def held(state: NodeState, *some: tuple[str, int, int]) -> NodeState:
    """The node with a slot of these instances held by a pod each: (instance, cores, MiB), numbered from 0 on each."""
    taken: dict[str, int] = {}
    for number, (instance, cores, memory) in enumerate(some):
        device = DeviceID(f"{instance}::{taken.setdefault(instance, 0)}")
        taken[instance] += 1
        allocation = Allocation(
            id=AllocationID(f"held-{number}"),
            devices={GPU: (device,)},
            slots={device: Amount(cores=cores, memory=memory * MIB)},
            parents=state.ownership.parents_of([device]),
        )
        granted = AllocationGranted(node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=allocation)
        state = state.apply(granted)
    return state


def given(allocation: Allocation) -> Mapping[str, tuple[int, int]]:
    """Instance of which an allocation has a slot -> cores and MiB that it holds of it."""
    return {base_of(slot): (each.cores, each.memory // MIB) for slot, each in allocation.slots.items()}


def test_an_instance_has_its_memory_and_all_cores() -> None:
    offered = offered_in_slots(MACHINE)

    assert {base: Amount(cores=100, memory=memory * MIB) for base, memory in MEMORY.items()} == offered
    assert Amount(cores=33, memory=3_285 * MIB) == equal_part(MACHINE, DeviceID("MIG-0-1"))


@pytest.mark.parametrize("rules", BOTH)
def test_a_percentage_is_of_the_instance(rules: AdmissionRules) -> None:
    state = held(node(MACHINE), ("MIG-0-0", 90, 100), ("MIG-1-0", 90, 100))

    found = admitted(state, pod(asks(percentage=50, cores=20)), rules)[0]

    assert {"MIG-0-1": (20, 4_928)} == given(found)


@pytest.mark.parametrize("rules", BOTH)
def test_several_slots_are_of_different_instances(rules: AdmissionRules) -> None:
    found = admitted(node(MACHINE), pod(asks(3, memory=100, cores=50)), rules)[0]

    assert dict.fromkeys(MEMORY, (50, 100)) == given(found)


def test_a_full_instance_leaves_the_others_of_its_gpu() -> None:
    state = held(node(MACHINE), ("MIG-0-0", 100, 100))

    healthy = {base_of(slot) for slot in state.healthy(GPU) if slot != "MIG-0-0::0"}

    assert {"MIG-0-1", "MIG-1-0"} == healthy


def test_what_is_left_of_a_gpu_is_that_of_its_instances() -> None:
    state = held(node(MACHINE), ("MIG-0-0", 100, 100), ("MIG-0-1", 30, 1_000))

    first, second = (partitioning_by_gpu(state)[gpu.id] for gpu in MACHINE.gpus[:2])

    assert ("MIG", "slots") == first.ways == second.ways
    assert Parts(slots=6, cores=200, memory=14_720 * MIB) == first.offered
    assert Parts(slots=2, cores=70, memory=8_856 * MIB) == first.left
    assert [Parts(slots=1, cores=100, memory=100 * MIB), Parts(slots=1, cores=30, memory=1_000 * MIB)] == [
        each.parts for each in first.held
    ]
    assert Parts(slots=3, cores=100, memory=4_864 * MIB) == second.left


def test_slots_of_a_gpu_that_is_held_whole_are_not_given() -> None:
    """As after a change of the configuration."""
    whole = node(msgspec.structs.replace(MACHINE, offers=(Offer(resource=GPU, devices=(MACHINE.gpus[1].id,)),)))
    allocation = Allocation(id=AllocationID("whole"), devices={GPU: (MACHINE.gpus[1].id,)})
    now = node(MACHINE).apply(
        AllocationGranted(node=whole.node, epoch=whole.epoch, seq=whole.seq + 1, allocation=allocation)
    )

    left = {base: each.usable for base, each in now.ownership.slots_left.items()}

    assert {"MIG-0-0": True, "MIG-0-1": True, "MIG-1-0": False} == left


def test_instances_have_no_links_and_gpus_beside_them_keep_theirs() -> None:
    mixed = in_slots(in_mig_mode(DGX, [4_864, 4_864]), SLOTS)

    scores = link_scorer(mixed).scores

    assert ["MIG-0-0", "MIG-0-1", *(gpu.id for gpu in DGX.gpus[1:])] == [base for base, _ in shareable_devices(mixed)]
    assert not any(scores[0]) and not any(scores[1])
    assert all(scores[2][other] for other in range(3, 9))
    assert [list(row[1:]) for row in link_scorer(DGX).scores[1:]] == [row[2:] for row in scores[2:]]


def test_machines_with_instances_of_other_sizes_are_judged_apart() -> None:
    other = in_slots(in_mig_mode(DGX, [4_864, 9_856], [9_856]), SLOTS, 2)

    assert machine_key(MACHINE) != machine_key(other)


def test_only_gpus_and_their_instances_have_slots() -> None:
    nic = MACHINE.nics[0].id
    wrong = msgspec.structs.replace(MACHINE, offers=(Offer(resource=GPU, devices=(nic,), replicas=2, slots=Slots()),))

    with pytest.raises(InvalidField, match="is not offered in two or more slots"):
        validate(wrong)


def test_whole_gpus_in_slots_are_chosen_as_before() -> None:
    state = holding(node(in_slots(DGX)), (3, 40, 100))

    assert set_scorer(state.hardware) is link_scorer(state.hardware)
    assert {"GPU-3"} == {*given(admitted(state, pod(asks(memory=100, cores=20)), BEST)[0])}


@settings(max_examples=60)
@drawn(
    st.lists(
        st.tuples(st.sampled_from(sorted(MEMORY)), st.integers(0, 60), st.integers(0, 6_000)),
        max_size=7,
    ),
    st.integers(1, 3),
    st.integers(1, 9_856),
    st.integers(0, 100),
    st.sampled_from(BOTH),
)
def test_a_share_fits_where_enough_instances_have_enough(
    some: list[tuple[str, int, int]], size: int, memory: int, cores: int, rules: AdmissionRules
) -> None:
    """Compared with a look at each instance by itself."""
    used: dict[str, list[tuple[int, int]]] = {instance: [] for instance in MEMORY}
    for instance, *amount in some:
        taken = [*used[instance], (amount[0], amount[1])]
        if len(taken) <= SLOTS and sum(c for c, _ in taken) <= 100 and sum(m for _, m in taken) <= MEMORY[instance]:
            used[instance] = taken
    state = held(node(MACHINE), *((instance, c, m) for instance, taken in used.items() for c, m in taken))

    decision = admit(state, pod(asks(size, memory=memory, cores=cores)), rules)

    fitting = {
        instance
        for instance, taken in used.items()
        if (not taken if cores == 100 else len(taken) < SLOTS)
        and 100 - sum(c for c, _ in taken) >= max(1, cores)
        and MEMORY[instance] - sum(m for _, m in taken) >= memory
    }
    assert isinstance(decision, Admission) == (len(fitting) >= size), decision
    if isinstance(decision, Admission):
        found = given(decision.allocations[0])
        assert size == len(found)
        assert {*found} <= fitting
        assert {(cores, memory)} == {*found.values()}
