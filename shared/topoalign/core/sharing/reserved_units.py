"""
What reservations say to a kubelet that asks for units of GPUs.

It asks for the two halves of a share one after the other, and names no container. Both halves of a reservation are of one
GPU, or of the same ones, so they are tied: the second is the answer only if the first is on its GPU. Example:

    reserved: for pod a 20 units of computing time and 16 blocks of GPU-0, for pod b 20 and 8 of GPU-1
    asked for 20 units of computing time: those of GPU-0; then for 8 blocks: none of these, the kubelet came for pod b, and
    follows what that has been given of GPU-0

A share that is spread over several GPUs is given as it is reserved or not at all: who gives it does not know that it is
spread, and of one GPU a container would have another share than was meant.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.reserved import parts_of
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations, allocations_of, not_given


class OpenHalf(NamedTuple):
    """A grant whose other half the kubelet may ask for next."""

    allocation: Allocation
    is_certain: bool
    """Whether it lacks that for certain: it is computing time of a part of a GPU, and no memory of it was given before."""


class ShareQuestion(NamedTuple):
    """What a kubelet asks to be told."""

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
    has told already, then equal parts of the GPUs of `half`, then a container that may have got `half` instead of what was
    reserved for it, then one of which the other half is given, then what was reserved first.
    """
    if not reserved.reservations:
        return None
    resource, available, must_include, size = question
    offered, required = frozenset(available), frozenset(must_include)
    found: list[tuple[tuple[bool, ...], bool, frozenset[DeviceID]]] = []
    for uid, container, units in parts_of(reserved, now, resource):
        if len(units) != size or not required <= units <= offered or not is_share(container, units):
            continue
        given = given_half(state, uid, container, resource)
        if given is not None and not are_together(units, given):
            continue
        is_next = given is not None and half is not None and given.id == half.allocation.id
        is_beside = given is None and half is not None and are_together(units, half.allocation)
        is_left = given is None and is_apart(container, resource, units)
        if is_left and not is_beside:
            continue
        is_swapped = given is None and half is not None and may_be_other_half(half.allocation, container, units)
        first = (is_next, is_left, is_beside and is_spread(units), is_swapped, given is not None)
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


def is_share(container: ReservedContainer, units: Collection[DeviceID]) -> bool:
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
    waiting = [(container, ids) for _, container, ids in parts_of(reserved, now, resource) if len(ids) == size]
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
        for allocation in allocations_of(reservation):
            if (allocation.amounts or allocation.slots) and (left := not_given(allocation, state)).devices:
                state = state.holding(left)
    return state
