"""
What reservations say to a kubelet that asks for slots of GPUs.

The slots of a reservation are its own, so a kubelet that takes them tells by that what its container holds of each GPU. A
part of a reservation is open as long as the kubelet takes its slots to be free; so a kubelet that has started anew, and asks
again for a container that it had admitted half, is told the same again. It is open as well where nobody holds its slots and
the kubelet does not offer them: it may align the container to other NUMA nodes than was predicted. A container whose pod
limits its GPUs must have just its slots then, or none (`may_move`). Example:

    reserved: for a's first container GPU-0::3 with 20 cores, for its second one GPU-1::0 with 60
    asked for one of all slots: GPU-0::3; when this is held, for one of all others: GPU-1::0
    asked for one of GPU-1's slots, when nobody holds GPU-0::3: none, it is the container with 20 cores
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import NamedTuple

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.sharing.reserved_units import ShareQuestion, reservations_of
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.share_amounts import NONE_HELD, larger

PartName = tuple[str, ContainerName]
"""UID of a pod and its container."""


class OpenPart(NamedTuple):
    """The slots of a container that it is not known to have."""

    name: PartName
    slots: frozenset[DeviceID]
    amount: Amount | None
    """The most that it will hold of a GPU; None: it is not known of all."""
    may_move: bool
    """Whether it may have slots of other GPUs, too."""


def open_parts(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    question: ShareQuestion,
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> Iterator[OpenPart]:
    """
    The parts, at monotonic second `now`, of as many slots as are asked for: in the order in which the pods were reserved,
    those last that are planned with their gang, and in that of their containers. `instead`: the slots that a kubelet was
    told instead of those of a part.
    """
    if not reserved.reservations:
        return
    offered, is_held = frozenset(question.available), state.ownership.is_held
    for each in sorted(reserved.reservations, key=attrgetter("planned")):
        for container in each.containers if reserved.until[each.pod_uid] > now else ():
            own = frozenset(container.devices.get(question.resource, ()))
            slots = instead.get((each.pod_uid, container.container), own) if own else own
            if len(slots) != question.size or has_got(state, each, container, slots):
                continue
            others = slots - left_by_init(each)  # those are held until it takes them over
            if slots <= offered or not any(map(is_held, others or slots)):
                may_move = container.may_move or not container.slots  # of a registry that knows no annotations
                yield OpenPart((each.pod_uid, container.container), slots, most_of(container, own), may_move)


def left_by_init(reservation: Reservation) -> frozenset[DeviceID]:
    """What is reserved for the init containers of a pod, which later containers may take over."""
    init = (each for each in reservation.containers if each.role == "init")
    return frozenset(device for each in init for ids in each.devices.values() for device in ids)


def untold_part(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    resource: ResourceName,
    slots: Collection[DeviceID],
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> OpenPart | None:
    """
    The part that a kubelet asks for when it takes these slots, which are none that it was told. None: there is none, as far
    as can be told.
    """
    parts = [*open_parts(state, reserved, now, ShareQuestion(resource, slots, (), len(slots)), instead)]
    return None if not parts or any(each.slots == frozenset(slots) for each in parts) else parts[0]


def most_of(container: ReservedContainer, slots: Collection[DeviceID]) -> Amount | None:
    """The most that a container will hold by one of these slots; None: it is not known of all."""
    if not container.slots.keys() >= {*slots}:
        return None
    most = NONE_HELD
    for slot in slots:
        most = larger(most, container.slots[slot])
    return most


def answering_part(question: ShareQuestion, parts: Sequence[OpenPart]) -> OpenPart | None:
    """
    The part of which the slots are the answer: the first one, which the question is about, or a later one with as much that
    fits where it does not; of another pod only if both may move. `parts`: those that are open.
    """
    offered, required = frozenset(question.available), frozenset(question.must_include)
    for each in parts:
        first = parts[0]
        alike = each.amount == first.amount and (each.name[0] == first.name[0] or (each.may_move and first.may_move))
        if alike and required <= each.slots <= offered:
            return each
    return None


def has_got(
    state: NodeState, reservation: Reservation, container: ReservedContainer, slots: Collection[DeviceID]
) -> bool:
    """Whether the record shows this very container with any of the slots: the kubelet may have lost its own record."""
    names = (reservation.namespace, reservation.pod, container.container)
    for each in state.allocations.values():
        owner = each.owner
        if owner is None or each.device_ids.isdisjoint(slots):
            continue
        if (owner.namespace, owner.pod, owner.container) == names and each.pod_uid in ("", reservation.pod_uid):
            return True
    return False


def amounts_reserved(
    reserved: NodeReservations, now: float, resource: ResourceName, slots: Collection[DeviceID]
) -> Mapping[DeviceID, Amount]:
    """What is reserved of GPUs with just these slots; empty: nothing is, or it is not known how much."""
    return next((container.slots for _, container in reservations_of(reserved, now, resource, slots)), {})


def pods_meant(
    reserved: NodeReservations, now: float, resource: ResourceName, amounts: Mapping[DeviceID, Amount]
) -> tuple[str, ...]:
    """
    UIDs of the pods with a container for which, at monotonic second `now`, as much is reserved as these slots hold: a
    kubelet does not tell which of them it is. `amounts`: slot -> what is held by it.
    """
    return tuple(
        each.pod_uid
        for each in reserved.reservations
        if reserved.until[each.pod_uid] > now
        and any(is_meant(each, container, resource, amounts) for container in each.containers)
    )


def pod_robbed(
    state: NodeState, reserved: NodeReservations, now: float, resource: ResourceName, slots: Collection[DeviceID]
) -> str:
    """
    UID of the pod that waits, at monotonic second `now`, for as many slots as these, and whose own ones others have got, as
    far as is known; empty: there is none, or just these are reserved.
    """
    if amounts_reserved(reserved, now, resource, slots):
        return ""
    for each in reserved.reservations:
        for container in each.containers if reserved.until[each.pod_uid] > now else ():
            own = frozenset(container.devices.get(resource, ()))
            is_known = len(own) == len(slots) and own <= container.slots.keys()
            if is_known and any(map(state.ownership.is_held, own)) and not has_got(state, each, container, own):
                return each.pod_uid
    return ""


def is_meant(
    reservation: Reservation,
    container: ReservedContainer,
    resource: ResourceName,
    amounts: Mapping[DeviceID, Amount],
) -> bool:
    """Whether a container may hold as much by as many slots."""
    bounds = bounds_for(reservation, container.container, resource)
    if bounds is None or len(container.devices[resource]) != len(amounts):
        return False
    return all(is_within(bounds[0], amount, bounds[1]) for amount in amounts.values())


def bounds_for(
    reservation: Reservation, name: ContainerName | None, resource: ResourceName
) -> tuple[Amount, Amount] | None:
    """
    The least and the most that a container of this name may hold of a GPU by what is reserved for its pod. A later container
    may have what an init container had by the same slot, and one that was moved has of each GPU the most that it was to have
    of any. None: nothing is reserved for it, or it is not known how much.
    """
    mine = [each for each in reservation.containers if each.container == name]
    own = [amount for each in mine for slot in each.devices.get(resource, ()) for amount in [each.slots.get(slot)]]
    if not own or None in own:
        return None
    before = [amount for each in reservation.containers if each.role == "init" for amount in each.slots.values()]
    known = [each for each in own if each is not None]
    return reduce(smaller, known), reduce(larger, [*known, *before])


def smaller(one: Amount, other: Amount) -> Amount:
    """As much of each kind as the smaller one has."""
    return Amount(cores=min(one.cores, other.cores), memory=min(one.memory, other.memory))


def is_within(least: Amount, amount: Amount, most: Amount) -> bool:
    """Whether an amount is, of each kind, between two others or one of them."""
    return least.cores <= amount.cores <= most.cores and least.memory <= amount.memory <= most.memory
