"""
Answers a kubelet that asks which devices it should take with those that are reserved.

GetPreferredAllocation names neither pod nor container. The answer is the reserved device set that fits the question:
devices of the resource, as many as are asked for, all of them available, those among them that must be included. Of
several that fit, one of a container that has got another of its parts comes first, because the kubelet asks for the
resources of a container one after the other; then the one that was reserved first. Parts of one size are
interchangeable, and which pod has which is known once the kubelet names the owner. What is planned for a pod of a gang,
and not for one that is about to be bound, is not the answer while another one of its size is: the kubelet asks for that
one. Example:

    reserved: for pod a GPU-0, GPU-1 and mlx5_0; for pod b GPU-4, GPU-5 and mlx5_4
    asked for 2 of all GPUs: GPU-0, GPU-1; then for 1 of all NICs: mlx5_0, because pod a's GPUs are given by now
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
    """The devices reserved at monotonic second `now` that fit the question, in the hardware's order; () where none do."""
    if not reserved.reservations:  # most often, and thousands of shares may be available
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
    Pod UID, container and all its devices of the resource, where none of them is given yet, the oldest first. What is
    planned is left out while as many devices are reserved for a pod that is about to be bound.
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
    """The container for which just these devices of the resource are reserved at monotonic second `now`, given or not."""
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
    """
    All devices of a resource that are reserved at monotonic second `now` and not given yet, co-allocated ones included.
    """
    return frozenset(
        device
        for each in reserved.held(now)
        for container in each.containers
        for devices in (container.devices, container.co_allocated)
        for device in devices.get(resource, ())
    )
