"""
Answers a kubelet that asks for slots of GPUs with those that are reserved.

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
from operator import attrgetter
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

# Answers a kubelet that asks for units of GPUs with those that are reserved.
#
# It asks for the two halves of a share one after the other, and names no container. Both halves of a reservation are of
# one GPU, or of the same ones, so the second half is the answer only if the first is on its GPU. Example:
#
#     reserved: for pod a 20 units of computing time and 16 blocks of GPU-0, for pod b 20 and 8 of GPU-1
#     asked for 20 units of computing time: those of GPU-0; then for 8 blocks: none of these, the kubelet came for pod b, and
#     follows what that has been given of GPU-0
#
# A share that is spread over several GPUs is given as it is reserved or not at all: the code that gives it does not
# know that it is spread, and of one GPU a container would have a wrong share.


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

    The container of which `half` is a part comes first, then one that lost what became `half` to a pod of which the kubelet
    has answered already, then equal parts of the GPUs of `half`, then a container that may have got `half` instead of
    what was reserved for it, then one of which the other half is given, then what was reserved first.
    """
    if not reserved.reservations:
        return None
    resource, available, must_include, size = question
    offered = frozenset(available)
    required = frozenset(must_include)
    found: list[tuple[tuple[bool, ...], bool, frozenset[DeviceID]]] = []
    for uid, container, units in open_reservations(reserved, now, resource):
        if len(units) != size or not required <= units <= offered or not is_reserved_share(container, units):
            continue
        given = given_half(state, uid, container, resource)
        if given is not None and not are_together(units, given):
            continue
        is_next = given is not None and half is not None and given.id == half.allocation.id
        is_on_gpus_of_half = given is None and half is not None and are_together(units, half.allocation)
        is_left = given is None and is_apart(container, resource, units)
        if is_left and not is_on_gpus_of_half:
            continue
        is_swapped = given is None and half is not None and may_be_other_half(half.allocation, container, units)
        first = (is_next, is_left, is_on_gpus_of_half and is_spread(units), is_swapped, given is not None)
        found.append((first, is_swapped, units))
    if not found:
        return None
    _, is_swapped, chosen = max(found, key=lambda each: each[0])
    return ReservedUnits(
        tuple(unit for unit in state.hardware.devices.get(resource, {}) if unit in chosen), is_swapped=is_swapped
    )


def may_be_other_half(grant: Allocation, container: ReservedContainer, units: Collection[DeviceID]) -> bool:
    """Whether a grant, of other GPUs than these units of a container, is as large as what is reserved with them."""
    others = sum(len(ids) for ids in container.devices.values() if amounts_of(ids) and {*ids} != {*units})
    return not are_together(units, grant) and len(grant.device_ids) == others


def is_apart(container: ReservedContainer, resource: ResourceName, units: Collection[DeviceID]) -> bool:
    """
    Whether the other half of what is reserved for a container is of other GPUs than these units of the resource: somebody
    has got it, or of equal pods one that the kubelet asked for before.
    """
    others = [amounts_of(ids).keys() for name, ids in container.devices.items() if name != resource]
    return any(others) and amounts_of(units).keys() not in others


def given_half(state: NodeState, uid: str, container: ReservedContainer, resource: ResourceName) -> Allocation | None:
    """What this container, or whoever took its part of the reservation, was given of its other half; None: nothing yet."""
    for name, units in container.devices.items():
        if name == resource or not amounts_of(units):
            continue
        for each in reversed(tuple(state.allocations.values())):
            is_own = each.pod_uid == uid and each.owner is not None and each.owner.container == container.container
            may_be = each.pod_uid in ("", uid) and {*each.devices.get(name, ())} == {*units}
            if may_be or (is_own and name in each.devices):
                return each
    return None


def has_others(
    state: NodeState, uid: str, container: ReservedContainer, resource: ResourceName, units: Collection[DeviceID]
) -> bool:
    """Whether this container has other units of a resource than these, which are somebody else's then."""
    return any(
        each.pod_uid == uid
        and each.owner is not None
        and each.owner.container == container.container
        and resource in each.devices
        and {*each.devices[resource]} != {*units}
        for each in state.allocations.values()
    )


def is_reserved_share(container: ReservedContainer, units: Collection[DeviceID]) -> bool:
    """Whether units that are reserved for a container are of one GPU, or of equal parts of several, or it has whole ones."""
    return len(amounts_of(units)) == 1 or has_whole(container) or is_spread(units)


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


def reservations_of(
    reserved: NodeReservations, now: float, resource: ResourceName, units: Collection[DeviceID]
) -> Iterator[tuple[Reservation, ReservedContainer]]:
    """The reservations, and the container of each, of which just these units of the resource are a part, given or not."""
    wanted = frozenset(units) if reserved.reservations else frozenset[DeviceID]()
    for each in reserved.reservations:
        if reserved.until[each.pod_uid] <= now:
            continue
        for container in each.containers:
            if wanted == frozenset(container.devices.get(resource, ())):
                yield each, container


def is_all_of(devices: Mapping[ResourceName, Collection[DeviceID]], record: Allocation) -> bool:
    """Whether a record holds just what is reserved of its resources."""
    return all({*units} == {*devices.get(name, ())} for name, units in record.from_kubelet.items())


def with_reserved_shares(state: NodeState, reserved: NodeReservations, now: float) -> NodeState:
    """
    The state with all that is reserved and not given yet as held: of units of both kinds, and of slots. What an init
    container leaves to later containers of its pod is held once.
    """
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
    is_held = state.ownership.is_held
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


def unmatched_part(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    resource: ResourceName,
    slots: Collection[DeviceID],
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> OpenPart | None:
    """
    The part that a kubelet asks for when it takes these slots, which are none that it got as an answer. None: there
    is none, as far as can be determined.
    """
    parts = [*iterate_open_parts(state, reserved, now, ShareQuestion(resource, slots, (), len(slots)), instead)]
    return None if not parts or any(each.slots == frozenset(slots) for each in parts) else parts[0]


def most_of(container: ReservedContainer, slots: Collection[DeviceID]) -> Amount | None:
    """The most that a container will hold by one of these slots; None: it is not known of all."""
    if not container.slots.keys() >= {*slots}:
        return None
    most = NONE_HELD
    for slot in slots:
        most = larger_amount(most, container.slots[slot])
    return most


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


def pods_reserved_for(
    reserved: NodeReservations, now: float, resource: ResourceName, amounts: Mapping[DeviceID, Amount]
) -> tuple[str, ...]:
    """
    UIDs of the pods with a container for which, at monotonic second `now`, as much is reserved as these slots hold: a
    kubelet does not report which of them it is. `amounts`: slot -> what is held by it.
    """
    return tuple(
        each.pod_uid
        for each in reserved.reservations
        if reserved.until[each.pod_uid] > now
        and any(is_meant(each, container, resource, amounts) for container in each.containers)
    )


def displaced_pod(
    state: NodeState, reserved: NodeReservations, now: float, resource: ResourceName, slots: Collection[DeviceID]
) -> str:
    """
    Returns the UID of the displaced pod: at monotonic second `now` it waits for as many slots as these, and other
    pods have got its own, as far as is known. Empty: there is none, or just these are reserved.
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
    return reduce(smaller, known), reduce(larger_amount, [*known, *before])


def smaller(one: Amount, other: Amount) -> Amount:
    """As much of each kind as the smaller one has."""
    return Amount(cores=min(one.cores, other.cores), memory=min(one.memory, other.memory))


def is_within(least: Amount, amount: Amount, most: Amount) -> bool:
    """Whether an amount is, of each kind, between two others or one of them."""
    return least.cores <= amount.cores <= most.cores and least.memory <= amount.memory <= most.memory
