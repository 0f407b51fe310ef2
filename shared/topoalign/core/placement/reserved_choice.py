"""
Answers GetPreferredAllocation of the kubelet with the reserved devices.

The request contains neither pod nor container. The answer is a reserved device set that matches it: a set of the
resource and of the requested size, whose devices are all available, and which has all devices that must be included. If
several sets match, they are preferred in this order:

1. a set of a container that has already been allocated another of its parts, because the kubelet requests the resources
   of a container in sequence;
2. the set that was reserved first.

Parts of equal size are interchangeable. Which pod has which part is known when the kubelet reports the owner. A set
that is only planned for a pod of a gang is not the answer if a set of the same size is reserved for a pod that is about
to be bound: the kubelet's request is for the latter. Example:

    reserved: for pod a GPU-0, GPU-1 and mlx5_0; for pod b GPU-4, GPU-5 and mlx5_4
    request for 2 of all GPUs: GPU-0, GPU-1; then for 1 of all NICs: mlx5_0, because pod a already has its GPUs
"""

from collections.abc import Collection, Iterator, Sequence

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.reserved_parts import ReservedPart


def prefer_reserved(
    topology: Topology,
    reserved: NodeReservations,
    now: float,
    resource: ResourceName,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
) -> tuple[DeviceID, ...]:
    """The devices reserved at monotonic second `now` that match, in the hardware's order. (): there are none."""
    if not reserved.reservations:  # the most common case; thousands of shares can be available
        return ()
    offered = frozenset(available)
    required = frozenset(must_include)
    begun = {(part.pod_uid, part.container) for part in reserved.reported}
    fitting = [
        ((uid, container.container) not in begun, devices)
        for uid, container, devices in open_reservations(reserved, now, resource)
        if len(devices) == size and required <= devices <= offered
    ]
    if not fitting:
        return ()
    chosen = min(fitting, key=lambda each: each[0])[1]
    return tuple(device for device in topology.devices.get(resource, {}) if device in chosen)


def open_reservations(
    reserved: NodeReservations, now: float, resource: ResourceName
) -> Iterator[tuple[str, ReservedContainer, frozenset[DeviceID]]]:
    """
    Pod UID, container and all its reserved devices of the resource, if none of them is allocated yet. The oldest
    reservation comes first. Planned sets are omitted while a set of equal size is reserved for a pod about to be bound.
    """
    parts = [
        (each.pod_uid, container, devices)
        for each in reserved.reservations
        if reserved.until[each.pod_uid] > now
        for container in each.containers
        if (devices := frozenset(container.devices.get(resource, ())))
        and not any(
            ReservedPart(each.pod_uid, container.container, resource, device) in reserved.reported for device in devices
        )
    ]
    planned = {each.pod_uid for each in reserved.reservations if each.planned}
    asked = {len(devices) for uid, _, devices in parts if uid not in planned} if planned else frozenset[int]()
    yield from (part for part in parts if part[0] not in planned or len(part[2]) not in asked)


def reserved_with(
    reserved: NodeReservations, now: float, resource: ResourceName, devices: Collection[DeviceID]
) -> ReservedContainer | None:
    """The container for which exactly these devices of the resource are reserved at `now`, allocated or not."""
    wanted = frozenset(devices)
    return next(
        (
            container
            for each in reserved.reservations
            if reserved.until[each.pod_uid] > now
            for container in each.containers
            if wanted == frozenset(container.devices.get(resource, ()))
        ),
        None,
    )


def reserved_devices(reserved: NodeReservations, now: float, resource: ResourceName) -> frozenset[DeviceID]:
    """A resource's devices that are reserved at monotonic second `now` and not allocated, with co-allocated ones."""
    return frozenset(
        device
        for each in reserved.held(now)
        for container in each.containers
        for devices in (container.devices, container.co_allocated)
        for device in devices.get(resource, ())
    )
