"""
Chooses which reserved units or slots the kubelet gets if it requests a number of them. Its request names no container.

A share in units has two halves, computing time and memory. The kubelet requests them one after the other. Both halves of
a reservation are on the same GPU or GPUs. So the second half of a reservation answers a request only if the container's
first half is on the same GPUs. Example:

    reserved: for pod a 20 units of computing time and 16 blocks of GPU-0, for pod b 20 units and 8 blocks of GPU-1
    the kubelet requests 20 units and gets the units of a, on GPU-0; then it requests 8 blocks, so the container is b's
    b's reserved 8 blocks are on GPU-1, but the container's units are on GPU-0: no reserved blocks are returned

A share that is spread over several GPUs is returned exactly as reserved or not at all. The same number of units on one
GPU would be the wrong share.

No two reservations have the same slot. So the slots in an Allocate identify the container, and with it the amounts on
each GPU. A part of a reservation is open while the kubelet lists its slots as available. So if the kubelet restarts
during the admission of a container and requests its slots again, it gets the same slots. A part is also open if its
slots are free but the kubelet does not list them, because it aligned the container to other NUMA nodes than predicted.
Then the container may get other slots, unless the annotations of its pod restrict its GPUs (`may_move`). Example:

    reserved: for a's first container GPU-0::3 with 20 cores, for its second one GPU-1::0 with 60
    one slot requested, all slots listed as available: GPU-0::3
    one slot requested, all but GPU-0::3 listed, because it is held: GPU-1::0
    one slot requested, only GPU-1's slots listed, GPU-0::3 free: no answer, because the request is for the first container
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
    """The grant of one half of a share. The kubelet may request the other half next."""

    allocation: Allocation
    is_certain: bool
    """Whether the other half must follow: it grants computing time of a shared GPU to a container without memory."""


class ShareQuestion(NamedTuple):
    """The content of a kubelet's request for units or slots, as in GetPreferredAllocation."""

    resource: ResourceName
    available: Collection[DeviceID]
    must_include: Sequence[DeviceID]
    size: int


class ReservedUnits(NamedTuple):
    """Reserved units that match a request."""

    units: tuple[DeviceID, ...]
    """In the hardware's order."""
    is_swapped: bool
    """
    Whether the newest grant has the size of the other half but is on another GPU. In this case, the container may have
    received that grant instead of its own reserved half.
    """


def reserved_units(
    state: NodeState, reserved: NodeReservations, now: float, question: ShareQuestion, half: OpenHalf | None
) -> ReservedUnits | None:
    """
    The units reserved at monotonic second `now` that match the request best; None if none match. `half`: the newest
    grant, if the kubelet may request its other half now (`allocator.allocate.units`).
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
        # Whether its reserved halves are on different GPUs now, because another container got one of them.
        others = [amounts_of(ids).keys() for name, ids in container.devices.items() if name != resource]
        lost_half = given is None and any(others) and amounts_of(units).keys() not in others
        if lost_half and not is_on_gpus_of_half:
            continue
        # Whether the container may have got `half` instead of its reserved half: both have the same size.
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
            lost_half,  # then a container that got `half`, because its own reserved half went to another pod,
            is_on_gpus_of_half and is_spread(units),  # then equal parts of the GPUs of `half`,
            is_swapped,  # then one that may have got `half` instead,
            given is not None,  # then one whose other half is granted; then the first reserved
        )
        found.append((preference, is_swapped, units))
    if not found:
        return None
    _, is_swapped, chosen = max(found, key=lambda each: each[0])
    ordered = tuple(unit for unit in state.hardware.devices.get(resource, {}) if unit in chosen)
    return ReservedUnits(ordered, is_swapped=is_swapped)


def given_half(state: NodeState, uid: str, container: ReservedContainer, resource: ResourceName) -> Allocation | None:
    """
    The grant of the container's other half: a grant of exactly its reserved units, if the owner is this pod or is not
    known, or a grant of other units to this container. None: not granted yet.
    """
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
    """Whether the container holds units of a resource other than these. If so, these belong to another container."""
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
    The reserved units, not granted at monotonic second `now`, of a container that waits for `size` units spread over
    several shared GPUs. None if there is no such container, or if a container waits for exactly `units`.
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
    """Whether a grant is a part of a GPU's computing time without memory. A container never has such a part alone."""
    return any(0 < each.cores < CORES and not each.memory for each in half.amounts.values())


def are_together(units: Collection[DeviceID], other: Allocation) -> bool:
    """Whether units are on the same GPUs as the other half."""
    return amounts_of(units).keys() == other.amounts.keys()


def iterate_reserved(reserved: NodeReservations, now: float) -> Iterator[tuple[Reservation, ReservedContainer]]:
    """The reservations that are valid at monotonic second `now`, with each of their containers."""
    for each in reserved.reservations:
        if reserved.until[each.pod_uid] > now:
            yield from ((each, container) for container in each.containers)


def reservations_of(
    reserved: NodeReservations, now: float, resource: ResourceName, units: Collection[DeviceID]
) -> Iterator[tuple[Reservation, ReservedContainer]]:
    """Reservations and their containers for which exactly these units of the resource are reserved, granted or not."""
    wanted = frozenset(units)
    for each, container in iterate_reserved(reserved, now):
        if wanted == frozenset(container.devices.get(resource, ())):
            yield each, container


def is_all_of(devices: Mapping[ResourceName, Collection[DeviceID]], record: Allocation) -> bool:
    """Whether an allocation holds exactly the devices that are reserved, for each of its resources."""
    return all({*units} == {*devices.get(name, ())} for name, units in record.from_kubelet.items())


def with_reserved_shares(state: NodeState, reserved: NodeReservations, now: float) -> NodeState:
    """The state in which all units and slots that are reserved and not granted yet count as held."""
    for reservation in reserved.held(now):
        for allocation in reserved_allocations(reservation):
            if (allocation.amounts or allocation.slots) and (left := not_given(allocation, state)).devices:
                state = state.holding(left)
    return state


PartName = tuple[str, ContainerName]
"""UID of a pod, and name of the container."""


class OpenPart(NamedTuple):
    """The reserved slots of a container that is not known to have them yet."""

    name: PartName
    slots: frozenset[DeviceID]
    amount: Amount | None
    """The largest amount that the container will hold of one GPU; None: unknown for at least one slot."""
    may_move: bool
    """Whether it may get slots of other GPUs instead."""


def iterate_open_parts(
    state: NodeState,
    reserved: NodeReservations,
    now: float,
    question: ShareQuestion,
    instead: Mapping[PartName, frozenset[DeviceID]] = {},
) -> Iterator[OpenPart]:
    """
    The open parts at monotonic second `now` with the requested number of slots: in the order of reservations, then of
    their containers; parts that are planned for a gang come last. `instead`: part -> the slots that
    GetPreferredAllocation returned instead of the reserved ones.
    """
    if not reserved.reservations:
        return
    offered = frozenset(question.available)
    for each, container in sorted(iterate_reserved(reserved, now), key=lambda pair: pair[0].planned):
        own = frozenset(container.devices.get(question.resource, ()))
        slots = instead.get((each.pod_uid, container.container), own) if own else own
        if len(slots) != question.size or _has_got(state, each, container, slots):
            continue
        # init containers hold their slots until a later container reuses them
        init = (other for other in each.containers if other.role == "init")
        others = slots.difference(device for other in init for ids in other.devices.values() for device in ids)
        if slots <= offered or not any(map(state.ownership.is_held, others or slots)):
            may_move = container.may_move or not container.slots  # a reservation without amounts
            yield OpenPart((each.pod_uid, container.container), slots, most_of(container, own), may_move)


def _has_got(
    state: NodeState, reservation: Reservation, container: ReservedContainer, slots: Collection[DeviceID]
) -> bool:
    """
    Whether, by the ledger, the container already has one of these slots. The kubelet may still list the slot as
    available, if it lost its checkpoint.
    """
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
    """
    The open part for which an Allocate call is most likely made if its slots match no open part, so that
    GetPreferredAllocation did not return them. None: these slots match an open part, or no part of this size is open.
    """
    parts = [*iterate_open_parts(state, reserved, now, ShareQuestion(resource, slots, (), len(slots)), instead)]
    return None if not parts or any(each.slots == frozenset(slots) for each in parts) else parts[0]


def most_of(container: ReservedContainer, slots: Collection[DeviceID]) -> Amount | None:
    """The largest amount that a container will hold with any of these slots; None: unknown for at least one slot."""
    if not container.slots.keys() >= {*slots}:
        return None
    return reduce(larger_amount, (container.slots[slot] for slot in slots), NONE_HELD)


def answering_part(question: ShareQuestion, parts: Sequence[OpenPart]) -> OpenPart | None:
    """
    The part whose slots are returned. The request is for the first of the open `parts`. If its slots do not match the
    request, a later part with the same amount is returned, and a part of another pod only if both may move.
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
    """Slot -> reserved amount if exactly these slots are reserved. Empty: they are not, or the amounts are unknown."""
    return next((container.slots for _, container in reservations_of(reserved, now, resource, slots)), {})


def pods_reserved_for(
    reserved: NodeReservations, now: float, resource: ResourceName, amounts: Mapping[DeviceID, Amount]
) -> tuple[str, ...]:
    """
    UIDs of all pods for which the kubelet may have allocated these slots, because the amounts reserved for one of their
    containers at monotonic second `now` match. The kubelet does not name the pod. `amounts`: slot -> amount held by it.
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
    UID of the first pod that waits for this number of slots while another pod holds one of its reserved slots. Empty:
    there is no such pod, or exactly `slots` are reserved for some pod.
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
    The smallest and the largest amount of a GPU that a container of this name may hold by the reservation of its pod.
    None: nothing is reserved for it, or the amounts are unknown.
    """
    mine = [each for each in reservation.containers if each.container == name]
    own = [amount for each in mine for slot in each.devices.get(resource, ()) for amount in [each.slots.get(slot)]]
    if not own or None in own:
        return None
    # A later container may hold the amount of an init container's slot. A container that was moved to other GPUs holds
    # its largest reserved amount on each of them.
    before = [amount for each in reservation.containers if each.role == "init" for amount in each.slots.values()]
    known = [each for each in own if each is not None]
    least = Amount(cores=min(each.cores for each in known), memory=min(each.memory for each in known))
    return least, reduce(larger_amount, [*known, *before])


def is_within(least: Amount, amount: Amount, most: Amount) -> bool:
    """Whether the cores and the memory of an amount are both between `least` and `most`, inclusive."""
    return least.cores <= amount.cores <= most.cores and least.memory <= amount.memory <= most.memory
