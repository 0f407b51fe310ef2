"""
Answers a kubelet that asks for units or slots of GPUs with those that are reserved. The kubelet names no container.

It asks for the two halves of a share in units one after the other. Both halves of a reservation are of one GPU, or of
the same ones, so the second half is the answer only if the first is on its GPU. Example:

    reserved: for pod a 20 units of computing time and 16 blocks of GPU-0, for pod b 20 and 8 of GPU-1
    asked for 20 units of computing time: those of GPU-0; then for 8 blocks: none of these, the kubelet came for pod b, and
    follows what that has been given of GPU-0

A share that is spread over several GPUs is given as it is reserved or not at all: of one GPU a container would have a wrong
share.

The slots of a reservation are its own, so the slots that a kubelet takes show what its container holds of each GPU. A
part of a reservation is open as long as the kubelet takes its slots to be free; so a kubelet that has started anew, and asks
again for a container that it had admitted half, gets the same answer again. It is open as well where nobody holds its
slots and the kubelet does not offer them: it may align the container to other NUMA nodes than was predicted. A container
whose pod limits its GPUs must have just its slots then, or none (`may_move`). Example:

    reserved: for a's first container GPU-0::3 with 20 cores, for its second one GPU-1::0 with 60
    asked for one of all slots: GPU-0::3; when this is held, for one of all others: GPU-1::0
    asked for one of GPU-1's slots, when nobody holds GPU-0::3: none, it is the container with 20 cores
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.placement.reserved_choice import open_reservations
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, not_given, reserved_allocations
from topoalign.core.state.share_amounts import NONE_HELD, larger_amount


class OpenHalf(NamedTuple):
    """A grant whose other half the kubelet may ask for next."""

    allocation: Allocation
    is_certain: bool
    """Whether it lacks that for certain: it is computing time of a part of a GPU, and no memory of it was given before."""


class ShareQuestion(NamedTuple):
    """A kubelet's question."""

    resource: ResourceName
    available: Collection[DeviceID]
    must_include: Sequence[DeviceID]
    size: int


class ReservedUnits(NamedTuple):
    """Units that are reserved and fit a question."""

    units: tuple[DeviceID, ...]
    """In the hardware's order."""
    is_swapped: bool
    """Whether the newest grant may be their other half, of another GPU: it is as large as that."""


def reserved_units(
    state: NodeState, reserved: NodeReservations, now: float, question: ShareQuestion, half: OpenHalf | None
) -> ReservedUnits | None:
    """
    The units reserved at monotonic second `now` that fit the question best; None where none do. `half`: the newest grant, if
    the kubelet may ask for its other half now (`allocator.allocate.units`).
    """
    if not reserved.reservations:
        return None
    resource, available, must_include, size = question
    offered = frozenset(available)
    required = frozenset(must_include)
    found: list[tuple[tuple[bool, ...], bool, frozenset[DeviceID]]] = []
    for uid, container, units in open_reservations(reserved, now, resource):
        is_share = len(amounts_of(units)) == 1 or has_whole(container) or is_spread(units)
        if len(units) != size or not required <= units <= offered or not is_share:
            continue
        given = given_half(state, uid, container, resource)
        if given is not None and not are_together(units, given):
            continue
        newest = half.allocation if half is not None else None
        is_on_gpus_of_half = given is None and newest is not None and are_together(units, newest)
        # Whether its other half is of other GPUs: somebody got it, or of equal pods one that the kubelet asked for before.
        others = [amounts_of(ids).keys() for name, ids in container.devices.items() if name != resource]
        lost_half = given is None and any(others) and amounts_of(units).keys() not in others
        if lost_half and not is_on_gpus_of_half:
            continue
        # Whether it may have got `half` instead of what was reserved for it: that is as large.
        other_size = sum(len(ids) for ids in container.devices.values() if amounts_of(ids) and {*ids} != units)
        is_swapped = (
            given is None
            and newest is not None
            and not are_together(units, newest)
            and len(newest.device_ids) == other_size
        )
        preference = (
            given is not None
            and newest is not None
            and given.id == newest.id,  # the container of which `half` is a part,
            lost_half,  # then one that lost what became `half` to a pod of which the kubelet has answered already,
            is_on_gpus_of_half and is_spread(units),  # then equal parts of the GPUs of `half`,
            is_swapped,  # then one that may have got `half` instead,
            given is not None,  # then one of which the other half is given; then what was reserved first
        )
        found.append((preference, is_swapped, units))
    if not found:
        return None
    _, is_swapped, chosen = max(found, key=lambda each: each[0])
    ordered = tuple(unit for unit in state.hardware.devices.get(resource, {}) if unit in chosen)
    return ReservedUnits(ordered, is_swapped=is_swapped)


def given_half(state: NodeState, uid: str, container: ReservedContainer, resource: ResourceName) -> Allocation | None:
    """What this container, or whoever took its part of the reservation, was given of its other half; None: nothing yet."""
    for name, units in container.devices.items():
        if name == resource or not amounts_of(units):
            continue
        for each in reversed(tuple(state.allocations.values())):
            may_be = each.pod_uid in ("", uid) and {*each.devices.get(name, ())} == {*units}
            if may_be or (_belongs_to(each, uid, container) and name in each.devices):
                return each
    return None


def _belongs_to(allocation: Allocation, uid: str, container: ReservedContainer) -> bool:
    owner = allocation.owner
    return allocation.pod_uid == uid and owner is not None and owner.container == container.container


def has_others(
    state: NodeState, uid: str, container: ReservedContainer, resource: ResourceName, units: Collection[DeviceID]
) -> bool:
    """Whether this container has other units of a resource than these, which are somebody else's then."""
    return any(
        _belongs_to(each, uid, container) and resource in each.devices and {*each.devices[resource]} != {*units}
        for each in state.allocations.values()
    )


def is_spread(units: Collection[DeviceID]) -> bool:
    """Whether units are equal parts of several GPUs."""
    amounts = amounts_of(units)
    return len(amounts) > 1 and len({*amounts.values()}) == 1


def spread_for(
    reserved: NodeReservations, now: float, resource: ResourceName, size: int, units: Collection[DeviceID] = ()
) -> frozenset[DeviceID] | None:
    """
    The units, not given yet at monotonic second `now`, of a container that waits for so many of several GPUs, none of them
    whole. None: there is none, or just these `units` are what somebody waits for.
    """
    waiting = [(container, ids) for _, container, ids in open_reservations(reserved, now, resource) if len(ids) == size]
    if any(ids == frozenset(units) for _, ids in waiting):
        return None
    return next((ids for container, ids in waiting if is_spread(ids) and not has_whole(container)), None)


def has_whole(container: ReservedContainer) -> bool:
    """Whether whole GPUs are reserved for a container."""
    amounts = amounts_of(unit for units in container.devices.values() for unit in units)
    return any(each.cores >= CORES for each in amounts.values())


def needs_memory(half: Allocation) -> bool:
    """Whether a grant is computing time of a part of a GPU, which a container never has without memory."""
    return any(0 < each.cores < CORES and not each.memory for each in half.amounts.values())


def are_together(units: Collection[DeviceID], other: Allocation) -> bool:
    """Whether units are of the GPUs of the other half."""
    return amounts_of(units).keys() == other.amounts.keys()


def iterate_reserved(reserved: NodeReservations, now: float) -> Iterator[tuple[Reservation, ReservedContainer]]:
    """The reservations that last at monotonic second `now`, with each of their containers."""
    for each in reserved.reservations:
        if reserved.until[each.pod_uid] > now:
            yield from ((each, container) for container in each.containers)


def reservations_of(
    reserved: NodeReservations, now: float, resource: ResourceName, units: Collection[DeviceID]
) -> Iterator[tuple[Reservation, ReservedContainer]]:
    """The reservations, and the container of each, of which just these units of the resource are a part, given or not."""
    wanted = frozenset(units)
    for each, container in iterate_reserved(reserved, now):
        if wanted == frozenset(container.devices.get(resource, ())):
            yield each, container


def is_all_of(devices: Mapping[ResourceName, Collection[DeviceID]], record: Allocation) -> bool:
    """Whether a record holds just what is reserved of its resources."""
    return all({*units} == {*devices.get(name, ())} for name, units in record.from_kubelet.items())


def with_reserved_shares(state: NodeState, reserved: NodeReservations, now: float) -> NodeState:
    """The state with all units and slots that are reserved and not given yet as held."""
    for reservation in reserved.held(now):
        for allocation in reserved_allocations(reservation):
            if (allocation.amounts or allocation.slots) and (left := not_given(allocation, state)).devices:
                state = state.holding(left)
    return state


PartName = tuple[str, ContainerName]
"""UID of a pod and its container."""


class OpenPart(NamedTuple):
    """The reserved slots of a container that it is not yet known to have."""

    name: PartName
    slots: frozenset[DeviceID]
    amount: Amount | None
    """The most that it will hold of a GPU; None: it is not known of all."""
    may_move: bool
    """Whether it may have slots of other GPUs, too."""


def iterate_open_parts(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    question: ShareQuestion,
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> Iterator[OpenPart]:
    """
    The parts, at monotonic second `now`, of as many slots as are asked for: in the order in which the pods were reserved,
    those last that are planned with their gang, and in that of their containers. `instead`: the slots that a kubelet was
    answered instead of those of a part.
    """
    if not reserved.reservations:
        return
    offered = frozenset(question.available)
    for each, container in sorted(iterate_reserved(reserved, now), key=lambda pair: pair[0].planned):
        own = frozenset(container.devices.get(question.resource, ()))
        slots = instead.get((each.pod_uid, container.container), own) if own else own
        if len(slots) != question.size or _has_got(state, each, container, slots):
            continue
        # init containers hold theirs until a later container takes them over
        init = (other for other in each.containers if other.role == "init")
        others = slots.difference(device for other in init for ids in other.devices.values() for device in ids)
        if slots <= offered or not any(map(state.ownership.is_held, others or slots)):
            may_move = container.may_move or not container.slots  # of a registry that knows no annotations
            yield OpenPart((each.pod_uid, container.container), slots, most_of(container, own), may_move)


def _has_got(
    state: NodeState, reservation: Reservation, container: ReservedContainer, slots: Collection[DeviceID]
) -> bool:
    """Whether the record has this very container with any of the slots: the kubelet may have lost its own record."""
    names = (reservation.namespace, reservation.pod, container.container)
    return any(
        each.owner is not None
        and (each.owner.namespace, each.owner.pod, each.owner.container) == names
        and each.pod_uid in ("", reservation.pod_uid)
        and not each.device_ids.isdisjoint(slots)
        for each in state.allocations.values()
    )


def unmatched_part(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    resource: ResourceName,
    slots: Collection[DeviceID],
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> OpenPart | None:
    """The part that a kubelet asks for when it takes these slots, which are no answer that it got. None: none is known."""
    parts = [*iterate_open_parts(state, reserved, now, ShareQuestion(resource, slots, (), len(slots)), instead)]
    return None if not parts or any(each.slots == frozenset(slots) for each in parts) else parts[0]


def most_of(container: ReservedContainer, slots: Collection[DeviceID]) -> Amount | None:
    """The most that a container will hold by one of these slots; None: it is not known of all."""
    if not container.slots.keys() >= {*slots}:
        return None
    return reduce(larger_amount, (container.slots[slot] for slot in slots), NONE_HELD)


def answering_part(question: ShareQuestion, parts: Sequence[OpenPart]) -> OpenPart | None:
    """
    The part of which the slots are the answer: the first one, which the question is about, or a later one with as much that
    fits where it does not; of another pod only if both may move. `parts`: those that are open.
    """
    offered = frozenset(question.available)
    required = frozenset(question.must_include)
    for each in parts:
        first = parts[0]
        alike = each.amount == first.amount and (each.name[0] == first.name[0] or (each.may_move and first.may_move))
        if alike and required <= each.slots <= offered:
            return each
    return None


def amounts_reserved(
    reserved: NodeReservations, now: float, resource: ResourceName, slots: Collection[DeviceID]
) -> Mapping[DeviceID, Amount]:
    """What is reserved of GPUs with just these slots; empty: nothing is, or it is not known how much."""
    return next((container.slots for _, container in reservations_of(reserved, now, resource, slots)), {})


def pods_reserved_for(
    reserved: NodeReservations, now: float, resource: ResourceName, amounts: Mapping[DeviceID, Amount]
) -> tuple[str, ...]:
    """
    UIDs of the pods with a container for which, at monotonic second `now`, as much is reserved as these slots hold: a
    kubelet does not report which of them it is. `amounts`: slot -> what is held by it.
    """
    found: dict[str, None] = {}
    for each, container in iterate_reserved(reserved, now):
        bounds = bounds_for(each, container.container, resource)
        if bounds is None or len(container.devices[resource]) != len(amounts):
            continue
        least, most = bounds
        if all(is_within(least, held, most) for held in amounts.values()):
            found[each.pod_uid] = None
    return tuple(found)


def displaced_pod(
    state: NodeState, reserved: NodeReservations, now: float, resource: ResourceName, slots: Collection[DeviceID]
) -> str:
    """
    Returns the UID of the displaced pod: at monotonic second `now` it waits for as many slots as these, and other
    pods have got its own, as far as is known. Empty: there is none, or just these are reserved.
    """
    if amounts_reserved(reserved, now, resource, slots):
        return ""
    for each, container in iterate_reserved(reserved, now):
        own = frozenset(container.devices.get(resource, ()))
        is_known = len(own) == len(slots) and own <= container.slots.keys()
        if is_known and any(map(state.ownership.is_held, own)) and not _has_got(state, each, container, own):
            return each.pod_uid
    return ""


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
    least = Amount(cores=min(each.cores for each in known), memory=min(each.memory for each in known))
    return least, reduce(larger_amount, [*known, *before])


def is_within(least: Amount, amount: Amount, most: Amount) -> bool:
    """Whether an amount is, of each kind, between two others or one of them."""
    return least.cores <= amount.cores <= most.cores and least.memory <= amount.memory <= most.memory
