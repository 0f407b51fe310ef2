"""
What reservations say to a kubelet that asks for slots of GPUs.

The slots of a reservation are its own, so a kubelet that takes them tells by that what its container holds of each GPU. A
part of a reservation is open as long as the kubelet takes its slots to be free; so a kubelet that has started anew, and asks
again for a container that it had admitted half, is told the same again. Example:

    reserved: for a's first container GPU-0::3 with 20 cores, for its second one GPU-1::0 with 60
    asked for one of all slots: GPU-0::3; then for one of all but this: GPU-1::0
"""

from collections.abc import Collection, Iterator, Mapping

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.sharing.reserved_units import ShareQuestion, reservations_of
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations


def reserved_slots(
    state: NodeState, reserved: NodeReservations, now: float, question: ShareQuestion
) -> tuple[DeviceID, ...]:
    """
    The slots reserved at monotonic second `now` that fit the question, in the hardware's order; () where none do. Of several
    that fit, those come first of which the pod was reserved first, and its containers in their order.
    """
    resource, available, must_include, size = question
    if not reserved.reservations:
        return ()
    offered, required = frozenset(available), frozenset(must_include)
    for slots in open_parts(state, reserved, now, resource):
        if len(slots) == size and required <= slots <= offered:
            return tuple(slot for slot in state.hardware.devices.get(resource, {}) if slot in slots)
    return ()


def open_parts(
    state: NodeState, reserved: NodeReservations, now: float, resource: ResourceName
) -> Iterator[frozenset[DeviceID]]:
    """The slots of each container that it is not known to have."""
    for each in reserved.reservations:
        for container in each.containers if reserved.until[each.pod_uid] > now else ():
            slots = frozenset(container.devices.get(resource, ()))
            if slots and not has_got(state, each, container, slots):
                yield slots


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
