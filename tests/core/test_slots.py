"""GPUs in slots: which GPUs a container gets, what it holds of each, and that no GPU is held above what it has."""

import msgspec
import pytest
from decision_support import container, node, pod
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from slot_support import (
    CORES,
    MEMORY,
    MIB,
    PERCENTAGE,
    PRIORITY,
    WITH_NUMA_NODES,
    asks,
    given,
    holding,
    in_slots,
    slot,
)
from unit_support import BEST, DGX, KUBELET, admitted, refused

from topoalign.core import wire
from topoalign.core.admission.admit import admit
from topoalign.core.admission.feasibility import machine_key
from topoalign.core.demand.shares import share_in_slots
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import equal_part, held_by_slot, offered_in_slots, sum_amounts

SINGLE = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE)
BOTH = [BEST, KUBELET]
EACH = 40960
"""MiB of each GPU of the machine."""


@pytest.mark.parametrize("rules", BOTH)
def test_a_share_is_put_where_least_is_left(rules: AdmissionRules) -> None:
    state = holding(node(in_slots(DGX)), (3, 40, 10_000), (5, 70, 30_000))

    small, large = (admitted(state, pod(asks(memory=memory, cores=20)), rules)[0] for memory in (4_000, 20_000))

    assert {5: (20, 4_000)} == given(state, small)
    assert {3: (20, 20_000)} == given(state, large)


@pytest.mark.parametrize("rules", BOTH)
def test_several_gpus_are_different_ones(rules: AdmissionRules) -> None:
    state = holding(node(in_slots(DGX)), (0, 90, 1_000))

    found = admitted(state, pod(asks(3, percentage=50, cores=30)), rules)[0]

    assert 3 == len(given(state, found)) == len(found.devices[GPU])
    assert {(30, EACH // 2)} == {*given(state, found).values()}
    assert 0 not in given(state, found)


def test_without_an_amount_it_is_all_memory_of_a_gpu() -> None:
    state = node(in_slots(DGX, gpus=1))
    first = admitted(state, pod(asks()), BEST)[0]

    assert {0: (0, EACH)} == given(state, first)
    assert "NotEnoughShareMemory" == refused(holding(state, (0, 0, EACH)), pod(asks(memory=1)), BEST).code


@pytest.mark.parametrize("rules", BOTH)
def test_a_gpu_with_all_cores_is_nobody_elses(rules: AdmissionRules) -> None:
    """However it is scaled."""
    topology = in_slots(DGX, gpus=2, scaling=Slots(core_scaling=2.0))
    state = holding(node(topology), (0, 5, 100))

    whole = admitted(state, pod(asks(cores=100, memory=500)), rules)[0]
    after = holding(node(topology), (0, 5, 100), (1, 200, 500))

    assert {1: (200, 500)} == given(state, whole)
    assert {0: (0, 1)} == given(after, admitted(after, pod(asks(memory=1)), rules)[0])
    assert isinstance(admit(after, pod(asks(cores=100)), rules), Refusal)


@pytest.mark.parametrize("rules", BOTH)
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (asks(percentage=150), PERCENTAGE),
        (asks(cores=101), CORES),
        (asks(cores=150), CORES),
        (asks(memory=16 << 30), MEMORY),
        (asks(memory=EACH + 1), MEMORY),
        (asks(0, memory=100), MEMORY),
        (asks(priority=2), PRIORITY),
        (ContainerRequest(name=ContainerName("main"), limits={GPU: 1, MEMORY: 9, CORES: 0}), CORES),
        (ContainerRequest(name=ContainerName("main"), limits={CORES: 0}), CORES),
    ],
)
def test_bad_amounts_are_refused_by_their_fields(rules: AdmissionRules, asked: ContainerRequest, field: str) -> None:
    refusal = refused(node(in_slots(DGX)), pod(asked), rules)

    assert "InvalidShare" == refusal.code
    assert refusal.finding.startswith(f"spec.containers[0].resources.limits[{field}]: ")
    assert refusal.remedy


@pytest.mark.parametrize("rules", BOTH)
def test_more_gpus_than_there_are_is_refused(rules: AdmissionRules) -> None:
    assert "NotEnoughShareGpus" == refused(node(in_slots(DGX)), pod(asks(9)), rules).code


def test_annotations_choose_the_gpus_of_slots_without_an_amount_too() -> None:
    """A node that offers whole GPUs under the same name does not read them."""
    asked = pod(asks(), annotations={"nvidia.com/use-gputype": "H100"})

    assert "NoGpuAccepted" == refused(node(in_slots(DGX)), asked, KUBELET).code
    assert isinstance(admit(node(DGX), asked, KUBELET), Admission)


def test_what_a_pod_without_slots_says_about_cards_is_not_read() -> None:
    asked = pod(container(gpus=1), annotations={"hami.io/gpu-scheduler-policy": "mine"})

    assert isinstance(admit(node(DGX), asked, KUBELET), Admission)


def test_where_the_alignment_leaves_no_gpu_it_is_split() -> None:
    """The kubelet counts slots: NUMA nodes 1, 3, 5 and 7 have two GPUs each, and of GPU-0 and GPU-1 little is left."""
    listed = node(in_slots(DGX, scaling=WITH_NUMA_NODES))
    state = holding(listed, *((gpu, 50, 100) for gpu in range(0, 8, 2)))

    refusal = refused(state, pod(asks(2, memory=100, cores=60)), SINGLE)

    assert "ShareSplit" == refusal.code
    assert {1, 3} == {*given(state, admitted(state, pod(asks(2, memory=100, cores=60)), BEST)[0])}


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (asks(memory=100, cores=60), "NotEnoughShareCores"),
        (asks(memory=40_900), "NotEnoughShareMemory"),
        (asks(cores=100), "NotEnoughUnusedGpus"),
    ],
)
@pytest.mark.parametrize("rules", BOTH)
def test_what_a_node_lacks_is_named(asked: ContainerRequest, code: str, rules: AdmissionRules) -> None:
    state = holding(node(in_slots(DGX, gpus=1)), (0, 50, 100))

    refusal = refused(state, pod(asked), rules)

    assert code == refusal.code
    assert "limits[nvidia.com/gpu" in refusal.finding


def test_a_slot_without_an_amount_is_an_equal_part() -> None:
    state = holding(node(in_slots(DGX, 7)), 2)

    assert Amount(cores=14, memory=EACH // 7 * MIB) == equal_part(state.hardware, state.hardware.gpus[2].id)
    assert (86, EACH - EACH // 7) == left_of(state, 2)


def test_memory_is_scaled_in_whole_mib() -> None:
    topology = in_slots(DGX, scaling=Slots(memory_scaling=1.1, core_scaling=1.5))

    offered = offered_in_slots(topology)[DGX.gpus[0].id]

    assert Amount(cores=150, memory=45056 * MIB) == offered


def left_of(state: NodeState, gpu: int) -> tuple[int, int]:
    left = state.ownership.slots_left[DGX.gpus[gpu].id].left
    return left.cores, left.memory // MIB


def test_free_slots_of_a_spent_gpu_are_listed_unhealthy() -> None:
    state = holding(node(in_slots(DGX)), (0, 100, 500), (1, 5, EACH), (2, 60, EACH - 1))

    spent = {gpu.index for gpu in DGX.gpus if gpu.id in state.ownership.spent_gpus}

    assert {0, 1} == spent
    assert slot(0, 0, state) in state.healthy(GPU)
    assert slot(0, 1, state) not in state.healthy(GPU)
    assert not state.ownership.handed_out.listed_health_of(slot(1, 9, state)).usable
    assert slot(2, 9, state) in state.healthy(GPU)


def test_released_slots_are_listed_again() -> None:
    before = holding(node(in_slots(DGX)), (0, 60, 500))
    spent = holding(node(in_slots(DGX)), (0, 60, 500), (0, 40, 500))
    assert slot(0, 5, spent) not in spent.healthy(GPU)

    after = spent.without(AllocationID("held-1"))

    assert {*before.healthy(GPU)} == {*after.healthy(GPU)}


@pytest.mark.parametrize("rules", BOTH)
def test_a_slot_taken_over_holds_the_most_of_both(rules: AdmissionRules) -> None:
    state = holding(node(in_slots(DGX)), (4, 50, 5_000))
    app, init = asks(memory=3_000, cores=50), asks(memory=30_000, cores=10, name="first")

    found = admitted(state, pod(app, init=[init]), rules)

    assert found[0].devices == found[1].devices
    assert {4: (50, 30_000)} == given(state, found[0]) == given(state, found[1])


@pytest.mark.parametrize("rules", BOTH)
def test_a_container_counts_the_most_that_others_of_its_pod_hold(rules: AdmissionRules) -> None:
    """The app container takes over a slot of 50 cores and asks for 10: beside it and another pod no 40 are left."""
    state = holding(node(in_slots(DGX)), (4, 50, 5_000))
    init, first = asks(memory=3_000, cores=50, name="init"), asks(memory=30_000, cores=10, name="first")

    found = admitted(state, pod(first, asks(memory=100, cores=40), init=[init]), rules)

    assert {4: (50, 30_000)} == given(state, found[0]) == given(state, found[1])
    assert 4 not in given(state, found[2])


@pytest.mark.parametrize("order", [1, -1])
def test_by_a_slot_of_two_allocations_the_larger_amount_is_held(order: int) -> None:
    state = node(in_slots(DGX))
    device = slot(0, 0, state)
    amounts = [Amount(cores=60, memory=100), Amount(cores=5, memory=200)]
    both = [
        Allocation(id=AllocationID(f"a-{number}"), devices={GPU: (device,)}, slots={device: amount})
        for number, amount in enumerate(amounts)
    ]

    assert (
        Amount(cores=60, memory=200) == held_by_slot(state.hardware, both[::order])[state.hardware.gpus[0].id][device]
    )


def test_slots_that_are_taken_over_at_random_are_refused() -> None:
    state = node(in_slots(DGX))
    asked = pod(asks(memory=100), init=[asks(2, memory=100, name="first")])

    assert "ShareSplit" == refused(state, asked, KUBELET).code
    assert 2 == len(admitted(state, asked, BEST))


def test_amounts_are_in_events_and_in_digests() -> None:
    state = holding(node(in_slots(DGX)), (0, 30, 4_000))
    allocation = state.allocations[AllocationID("held-0")]
    event = AllocationGranted(node=state.node, epoch=1, seq=1, allocation=allocation)

    again = wire.decode_event(wire.encode_event(event, 0.0))

    assert isinstance(again, AllocationGranted)
    assert allocation.slots == again.allocation.slots
    assert state.digest != holding(node(in_slots(DGX)), 0).digest


def test_slots_that_are_not_among_the_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="slots that are not among the devices"):
        Allocation(id=AllocationID("x"), slots={slot(0, 0, node(in_slots(DGX))): Amount(cores=1, memory=1)})


def test_a_gpu_of_which_slots_are_held_is_in_no_time_slices_until_then() -> None:
    """Slots and time slices have the same ids: with 100 cores held by one slot nobody may get a slice of the GPU."""
    in_slices = msgspec.structs.replace(
        in_slots(DGX, 4), offers=(Offer(resource=GPU, devices=tuple(DGX.gpu_by_id), replicas=4),)
    )
    held = holding(node(in_slots(DGX, 4)), (0, 100, 4_000))
    said = held.topology
    assert said is not None
    changed = msgspec.structs.replace(said, topology=in_slices, revision=said.revision + 1)

    now = held.apply(changed)

    gpu = DGX.gpus[0].id
    assert frozenset({gpu}) == now.ownership.blocked
    assert not now.health_of(slot(0, 1, now)).usable
    assert now.health_of(slot(1, 1, now)).usable
    assert frozenset() == now.without(AllocationID("held-0")).ownership.blocked


def test_machines_in_slots_of_other_sizes_are_judged_apart() -> None:
    smaller = [msgspec.structs.replace(gpu, memory=1 << 30) for gpu in DGX.gpus]
    small = msgspec.structs.replace(DGX, gpus=tuple(smaller))
    shared = msgspec.structs.replace(
        in_slots(DGX), offers=(Offer(resource=GPU, devices=tuple(DGX.gpu_by_id), replicas=10),)
    )

    keys = {machine_key(each) for each in (in_slots(DGX), in_slots(small), shared)}

    assert 3 == len(keys)


amounts = st.tuples(st.integers(0, 100), st.integers(1, EACH))


@settings(max_examples=60)
@drawn(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 30_000)), max_size=6),
    st.integers(1, 4),
    amounts,
    st.sampled_from(BOTH),
)
def test_a_share_fits_where_enough_gpus_have_enough(
    held: list[tuple[int, int, int]], gpus: int, asked: tuple[int, int], rules: AdmissionRules
) -> None:
    """Compared with a look at each GPU by itself; a GPU has four slots."""
    cores, memory = asked
    used: dict[int, list[tuple[int, int]]] = {gpu: [] for gpu in range(4)}
    for gpu, *some in held:
        taken = [*used[gpu], (some[0], some[1])]
        if len(taken) <= 4 and sum(c for c, _ in taken) <= 100 and sum(m for _, m in taken) <= EACH:
            used[gpu] = taken
    state = holding(node(in_slots(DGX, 4, 4)), *((gpu, c, m) for gpu, some in used.items() for c, m in some))

    decision = admit(state, pod(asks(gpus, memory=memory, cores=cores)), rules)

    fitting = [
        gpu
        for gpu, some in used.items()
        if (not some if cores == 100 else len(some) < 4)
        and 100 - sum(c for c, _ in some) >= max(1, cores)
        and EACH - sum(m for _, m in some) >= memory
    ]
    assert isinstance(decision, Admission) == (len(fitting) >= gpus), decision
    if isinstance(decision, Admission):
        found = given(state, decision.allocations[0])
        assert {*found} <= {*fitting}
        assert gpus == len(found)
        assert {(cores, memory)} == {*found.values()}
        after = held_by_slot(state.hardware, [*state.allocations.values(), *decision.allocations])
        for slots in after.values():
            assert sum_amounts(slots.values()).cores <= 100
            assert sum_amounts(slots.values()).memory <= EACH * MIB
        free = {*decision.allocations[0].devices[GPU]}
        assert free.isdisjoint(device for each in state.allocations.values() for device in each.device_ids)


@drawn(st.integers(1, 8), st.integers(0, EACH), st.integers(0, 100), st.integers(0, 100))
def test_amounts_of_gpus_are_those_of_hami(gpus: int, memory: int, percentage: int, cores: int) -> None:
    """Memory counts before a percentage, and without either it is all of a GPU's."""
    mib = memory or EACH * (percentage or 100) // 100

    asked = share_in_slots(in_slots(DGX), {GPU: gpus, MEMORY: memory, PERCENTAGE: percentage, CORES: cores})

    assert asked is not None
    assert gpus == asked.gpus
    assert Amount(cores=cores, memory=mib * MIB) == asked.amount_of(Amount(cores=100, memory=EACH * MIB))
