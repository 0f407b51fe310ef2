"""Slots in reservations: what is held for a pod until it is shown, and what a kubelet is told that asks for slots."""

from collections.abc import Collection

import msgspec
import pytest
from decision_support import NODE, node, pod
from fact_support import changed, reservation
from slot_support import MIB, asks, holding, in_mig_mode, in_slots
from unit_support import DGX, KUBELET, admitted

from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.model.allocations import Allocation, Owner, Role
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.reserved_shares import (
    ShareQuestion,
    amounts_reserved,
    answering_part,
    bounds_for,
    iterate_open_parts,
    most_of,
    unmatched_part,
    with_reserved_shares,
)
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, reserved_allocations

FIRST, SECOND = DGX.gpus[0].id, DGX.gpus[1].id


def reserved(state: NodeState, name: str, *containers: tuple[int, int]) -> Reservation:
    """What a decision in this state gives a pod: (GPUs, MiB) of each container, with 20 cores."""
    asked = [asks(gpus, memory=memory, cores=20, name=f"c{place}") for place, (gpus, memory) in enumerate(containers)]
    request = pod(*asked, name=name)
    return reserved_for(f"uid-{name}", request, admitted(state, request, KUBELET), 60.0)


def of(*reservations: Reservation) -> NodeReservations:
    return NodeReservations().apply(changed(*reservations), 1, 0.0)


def gets(state: NodeState, name: str, slots: tuple[DeviceID, ...], container: str = "c0") -> NodeState:
    """The node after a container of a pod was given these slots."""
    owner = Owner(namespace=Namespace("default"), pod=PodName(name), container=ContainerName(container))
    given = Allocation(id=AllocationID(f"{name}/{container}"), owner=owner, devices={GPU: slots}, pod_uid=f"uid-{name}")
    return state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=given))


def answer(
    state: NodeState, kept: NodeReservations, available: Collection[DeviceID], size: int, now: float = 0.0
) -> tuple[DeviceID, ...]:
    question = ShareQuestion(GPU, available, (), size)
    part = answering_part(question, [*iterate_open_parts(state, kept, now, question)])
    return () if part is None else tuple(sorted(part.slots))


def test_what_is_reserved_is_held_with_its_amounts() -> None:
    state = node(in_slots(DGX, gpus=1))

    after = with_reserved_shares(state, of(reserved(state, "a", (1, 9_000))), 0.0)

    assert Amount(cores=80, memory=(40_960 - 9_000) * MIB) == after.ownership.slots_left[FIRST].left


def test_a_slot_that_is_given_is_held_once() -> None:
    state = node(in_slots(DGX, gpus=2))
    kept = of(reserved(state, "a", (1, 9_000), (1, 5_000)))
    first = kept.reservations[0].containers[0].devices[GPU]
    state = gets(state, "a", first)

    (left,) = kept.observe(state, own=True).held(0.0)

    assert ["c1"] == [each.container for each in left.containers]
    assert left.containers[0].devices[GPU] == tuple(left.containers[0].slots)


def test_a_container_may_hold_what_is_reserved_for_its_pod_by_its_slots() -> None:
    """
    No less than the least of its own, of each kind, and no more than the most of its own and of the init containers: a slot
    that it takes over keeps the larger amount.
    """

    def part(name: str, role: Role, *amounts: tuple[int, int]) -> ReservedContainer:
        slots = {DeviceID(f"GPU-{n}::0"): Amount(cores=cores, memory=mib) for n, (cores, mib) in enumerate(amounts)}
        return ReservedContainer(container=ContainerName(name), role=role, devices={GPU: tuple(slots)}, slots=slots)

    init, app = part("init", "init", (80, 5)), part("app", "app", (20, 30), (40, 10))
    pod = reservation("p", init, app, part("other", "app", (90, 90)))
    unknown = reservation("p", init, msgspec.structs.replace(app, slots={}))

    assert (Amount(cores=20, memory=10), Amount(cores=80, memory=30)) == bounds_for(pod, app.container, GPU)
    assert Amount(cores=40, memory=30) == most_of(app, app.devices[GPU])
    assert (None, None) == (bounds_for(unknown, app.container, GPU), most_of(unknown.containers[1], app.devices[GPU]))


def test_pods_that_are_swapped_swap_their_amounts() -> None:
    """A kubelet does not tell equal pods apart: b has got what was reserved for a. Half of each GPU is another amount."""
    state = node(in_slots(in_mig_mode(DGX, [4_864], [9_856]), gpus=2))
    asked = pod(asks(percentage=50, cores=60, name="c0"))
    one, other = (
        reserved_for(
            f"uid-{name}", msgspec.structs.replace(asked, name=PodName(name)), admitted(now, asked, KUBELET), 60.0
        )
        for name, now in (("a", state), ("b", holding(state, (0, 60, 0))))
    )
    of_a, of_b = (each.containers[0].slots for each in (one, other))
    assert [{2_432 * MIB}, {4_928 * MIB}] == [{each.memory for each in slots.values()} for slots in (of_a, of_b)]

    (left,) = of(one, other).observe(gets(state, "b", tuple(of_a))).held(0.0)

    assert ("a", of_b) == (left.pod, left.containers[0].slots)
    assert tuple(of_b) == left.containers[0].devices[GPU]


@pytest.mark.parametrize("machine", [in_slots(DGX), in_slots(in_mig_mode(DGX, [4_864], [9_856], [9_856]), gpus=3)])
def test_a_pod_has_its_own_amount_by_a_slot_of_one_with_more_gpus(machine: Topology) -> None:
    """b was aligned elsewhere, and got the slot of a instead of one of its own two."""
    state = node(machine)
    one = reserved(state, "a", (1, 3_000))
    other = reserved(holding(state, (0, 20, 40_000)), "b", (2, 5_000))
    slots_of_a, slots_of_b = (each.containers[0].devices[GPU] for each in (one, other))
    assert {*slots_of_a}.isdisjoint(slots_of_b)

    (left,) = of(one, other).observe(gets(state, "b", (*slots_of_a, slots_of_b[1]))).held(0.0)

    assert ("a", slots_of_b[:1]) == (left.pod, left.containers[0].devices[GPU])
    assert {slots_of_b[0]: Amount(cores=20, memory=3_000 * MIB)} == left.containers[0].slots


def test_slots_of_other_devices_in_a_reservation_are_passed_over() -> None:
    state = node(in_slots(DGX))
    forged = reserved(state, "a", (1, 9_000))
    container = msgspec.structs.replace(forged.containers[0], slots={DeviceID("GPU-x::1"): Amount(cores=1, memory=1)})

    (found,) = reserved_allocations(msgspec.structs.replace(forged, containers=(container,)))

    assert {} == found.slots


def test_the_kubelet_is_told_the_slots_of_each_container_in_order() -> None:
    state = node(in_slots(DGX, gpus=2))
    kept = of(reserved(state, "a", (1, 9_000), (1, 30_000), (2, 1_000)))
    parts = [each.devices[GPU] for each in kept.reservations[0].containers]
    free = {*state.hardware.devices[GPU]}

    def told(size: int, *gone: tuple[DeviceID, ...]) -> tuple[DeviceID, ...]:
        available, now = free.difference(*gone), state
        for place, slots in enumerate(gone):
            now = gets(now, "somebody", slots, f"c{place}")
        return answer(now, kept, available, size)

    assert parts[0] == told(1)
    assert parts[1] == told(1, parts[0])
    assert () == told(1, parts[0], parts[1])
    assert parts[2] == told(2)
    assert () == answer(state, kept, free, 1, 61.0)
    assert {30_000 * MIB} == {each.memory for each in amounts_reserved(kept, 0.0, GPU, parts[1]).values()}
    assert {} == amounts_reserved(kept, 0.0, GPU, parts[1] + parts[0])


def test_a_container_that_is_shown_is_not_told_its_slots_again() -> None:
    """The kubelet has lost its checkpoint, and takes the slots to be free."""
    state = node(in_slots(DGX, gpus=2))
    one = reserved(state, "a", (1, 9_000))
    kept = of(one, reserved(with_reserved_shares(state, of(one), 0.0), "b", (1, 9_000)))
    slots = kept.reservations[0].containers[0].devices[GPU]
    free = {*state.hardware.devices[GPU]}

    told = answer(gets(state, "a", slots), kept, free, 1)

    assert slots != told
    assert told == kept.reservations[1].containers[0].devices[GPU]


def strict(state: NodeState, name: str, *containers: tuple[int, int]) -> Reservation:
    """As `reserved`, for a pod that limits its GPUs."""
    asked = [asks(gpus, memory=memory, cores=20, name=f"c{place}") for place, (gpus, memory) in enumerate(containers)]
    request = pod(*asked, name=name, annotations={"nvidia.com/nouse-gpuuuid": FIRST})
    return reserved_for(f"uid-{name}", request, admitted(state, request, KUBELET), 60.0)


def test_slots_that_a_container_must_not_have_are_told() -> None:
    state = node(in_slots(DGX, gpus=3))
    kept = of(strict(state, "a", (1, 9_000), (2, 1_000)))
    first, second = (each.devices[GPU] for each in kept.reservations[0].containers)
    other = (DeviceID(f"{FIRST}::4"),)

    def told(state: NodeState, slots: tuple[DeviceID, ...]) -> str | None:
        part = unmatched_part(state, kept, 0.0, GPU, slots)
        return None if part is None else part.name[1]

    assert "c0" == told(state, other)
    assert "c1" == told(state, (*other, *first))
    assert None is told(state, first) is told(state, second)
    assert None is told(gets(state, "a", first), other)
    assert None is told(state, (*other, *first, *second))


def test_slots_that_a_container_must_have_go_to_no_other_pod() -> None:
    """The slots of the first part are not offered: the second container of its pod would do, the next pod would not."""
    state = node(in_slots(DGX, gpus=4))
    one = strict(state, "a", (1, 9_000), (1, 9_000))
    kept = of(one, reserved(with_reserved_shares(state, of(one), 0.0), "b", (1, 9_000)))
    first, second = (each.devices[GPU] for each in one.containers)
    free = {*state.hardware.devices[GPU]}.difference(first)

    assert second == answer(state, kept, free, 1)
    assert () == answer(state, kept, free.difference(second), 1)


def test_of_an_earlier_registry_a_container_with_amounts_keeps_its_gpus() -> None:
    """It repeats what it does not know without it. Where no amounts are reserved, it knew no slots: equal parts may move."""
    state = node(in_slots(DGX))
    moving = reserved(state, "a", (1, 9_000))
    known = {"c0": True}
    without = msgspec.json.encode(moving).replace(b'"may_move":true', b'"may_move_not":true')
    repeated = msgspec.json.decode(without, type=Reservation)
    equal = msgspec.structs.replace(repeated.containers[0], slots={})
    equal_parts = msgspec.structs.replace(repeated, containers=(equal,))

    def movable(reservation: Reservation) -> dict[str, bool]:
        question = ShareQuestion(GPU, state.hardware.devices[GPU], (), 1)
        return {each.name[1]: each.may_move for each in iterate_open_parts(state, of(reservation), 0.0, question)}

    assert known == movable(moving) == movable(equal_parts)
    assert {"c0": False} == movable(repeated) == movable(strict(state, "a", (1, 9_000)))


def test_what_is_planned_with_a_gang_comes_after_what_is_to_be_bound() -> None:
    """The gang was planned first, and the first of its pods to be bound asks for another amount."""
    state = node(in_slots(DGX, gpus=2))
    planned = msgspec.structs.replace(reserved(state, "planned", (1, 9_000)), planned=True)
    kept = of(planned, reserved(with_reserved_shares(state, of(planned), 0.0), "bound", (1, 4_000)))
    before, after = (each.containers[0].devices[GPU] for each in kept.reservations)
    free = state.hardware.devices[GPU]

    assert after == answer(state, kept, free, 1)
    assert before == answer(gets(state, "bound", after), kept, {*free}.difference(after), 1)


def test_a_container_aligned_elsewhere_is_not_told_the_slots_of_the_next() -> None:
    """Both ask for one slot, and for other amounts."""
    state = node(in_slots(DGX, gpus=2))
    kept = of(reserved(state, "a", (1, 9_000), (1, 35_000), (1, 9_000)))
    first, second, third = (each.devices[GPU] for each in kept.reservations[0].containers)
    free = {*state.hardware.devices[GPU]}.difference(first)

    assert third == answer(state, kept, free, 1)
    assert () == answer(state, kept, free.difference(third), 1)
    assert second == answer(gets(state, "somebody", first), kept, free, 1)
