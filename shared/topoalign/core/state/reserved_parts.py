"""
The parts of what is reserved for pods, which of them a node shows, and what of them pods have swapped.

`reservations` has the rules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import CPU, GPU, AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.state.fold import NodeState


class Part(NamedTuple):
    """What of a reservation ends at once."""

    pod_uid: str
    container: ContainerName
    resource: ResourceName
    """Of a device, `cpu`, or of a block of memory."""
    device: DeviceID = DeviceID("")
    """Empty: all of the resource, as of CPUs and memory."""


class Swap(NamedTuple):
    """A device that was reserved for one pod and given to another, which leaves one that was reserved for itself."""

    pod_uid: str
    """The pod that it was reserved for."""
    resource: ResourceName
    taken: DeviceID
    instead: DeviceID


def parts(reserved: ReservedContainer, uid: str) -> Iterator[Part]:
    """The parts of what is reserved for a container of this pod."""
    for devices in (reserved.devices, reserved.companions):
        yield from (Part(uid, reserved.container, name, device) for name, ids in devices.items() for device in ids)
    if reserved.cpus:
        yield Part(uid, reserved.container, CPU)
    yield from (Part(uid, reserved.container, block.resource) for block in reserved.memory)


def rest_of(reserved: ReservedContainer, uid: str, shown: frozenset[Part]) -> ReservedContainer:
    """What is reserved for a container without the parts that are shown."""
    left = {part for part in parts(reserved, uid) if part not in shown}

    def unseen(devices: Mapping[ResourceName, tuple[DeviceID, ...]]) -> dict[ResourceName, tuple[DeviceID, ...]]:
        rest = {
            name: tuple(device for device in ids if Part(uid, reserved.container, name, device) in left)
            for name, ids in devices.items()
        }
        return {name: ids for name, ids in rest.items() if ids}

    devices, companions = unseen(reserved.devices), unseen(reserved.companions)
    kept = {device for ids in (*devices.values(), *companions.values()) for device in ids}
    return msgspec.structs.replace(
        reserved,
        devices=devices,
        companions=companions,
        virtual_functions={nic: functions for nic, functions in reserved.virtual_functions.items() if nic in kept},
        cpus=reserved.cpus if Part(uid, reserved.container, CPU) in left else "",
        memory=tuple(each for each in reserved.memory if Part(uid, reserved.container, each.resource) in left),
    )


def is_something(reserved: ReservedContainer) -> bool:
    """Whether anything is reserved for the container."""
    return bool(reserved.devices or reserved.companions or reserved.cpus or reserved.memory)


def shown_by(
    state: NodeState, reservations: Sequence[Reservation], former: Mapping[str, Collection[AllocationID]], *, own: bool
) -> Iterator[Part]:
    """
    The parts of these reservations that the node shows as it is now. `former`: UID of a pod -> allocations from before its
    reservation, which show nothing of it by what they hold; `own`: as `NodeReservations.observe`.
    """
    live = state.allocations.values() if own else ()
    holders = {device: each.id for each in live for device in ids_held(each)}
    given = given_by_uid(state, companions=False)
    by_name = given_by_name(state)
    for reservation in reservations:
        before = frozenset(former.get(reservation.pod_uid, ()))
        init = [each for each in reservation.containers if each.role == "init"]
        left = {device for each in init for device in ids_reserved(each)}
        for reserved in reservation.containers:
            owner = (reservation.namespace, reservation.pod, reserved.container)
            resources = {*given.get((reservation.pod_uid, reserved.container), ()), *by_name.get(owner, ())}
            companions = {device for ids in reserved.companions.values() for device in ids}
            for part in parts(reserved, reservation.pod_uid):
                ids = reserved.virtual_functions.get(part.device, (part.device,))
                shown_with = GPU if part.device in companions else part.resource
                held_by = [holders.get(each) for each in ids]
                is_left = reserved.role != "init" and part.device in left  # held for the init container, maybe
                is_held = None not in held_by and before.isdisjoint(held_by) and not is_left
                if shown_with in resources or is_held:
                    yield part


def ids_reserved(reserved: ReservedContainer) -> Iterator[DeviceID]:
    """All devices that are reserved for a container."""
    for devices in (reserved.devices, reserved.companions):
        yield from (device for ids in devices.values() for device in ids)


def ids_held(allocation: Allocation) -> Iterator[str]:
    """The ids under which an allocation holds its devices: of a NIC in parts, its virtual functions."""
    for device in allocation.device_ids:
        yield from allocation.virtual_functions.get(device, (device,))


def given_by_uid(
    state: NodeState, *, companions: bool = True
) -> dict[tuple[str, ContainerName], dict[ResourceName, set[DeviceID]]]:
    """
    UID of a pod and container -> the resources that the record or the kubelet's checkpoints give it, with the devices;
    with or without companions.
    """
    given: dict[tuple[str, ContainerName], dict[ResourceName, set[DeviceID]]] = {}
    kubelet = state.usage.kubelet if state.usage is not None else None
    known: list[tuple[str, ContainerName, Allocation | CheckpointEntry]] = [
        (each.pod_uid, each.owner.container, each) for each in state.allocations.values() if each.owner is not None
    ]
    known += [(each.pod_uid, each.container, each) for each in (kubelet.entries if kubelet is not None else ())]
    for uid, container, held in known:
        if uid:
            found = given.setdefault((uid, container), {})
            devices = held.from_kubelet if isinstance(held, Allocation) and not companions else held.devices
            for resource in resources_of(held, devices):
                found.setdefault(resource, set()).update(devices.get(resource, ()))
    return given


def given_by_name(state: NodeState) -> dict[tuple[str, str, ContainerName], set[ResourceName]]:
    """Namespace, pod and container -> the resources that PodResources shows, of the kinds that no checkpoint tells."""
    usage = state.usage
    kubelet = usage.kubelet if usage is not None else None
    given: dict[tuple[str, str, ContainerName], set[ResourceName]] = {}
    for used in usage.containers if usage is not None else ():
        resources: set[ResourceName] = set()
        if kubelet is None or kubelet.unknown or kubelet.cpus_unknown:
            resources |= {CPU} if used.cpus else set()
        if kubelet is None or kubelet.unknown or kubelet.memory_unknown:
            resources |= {block.resource for block in used.memory}
        if kubelet is None or kubelet.unknown or kubelet.checkpoint_unknown:
            resources |= used.devices.keys()
        given[used.owner.namespace, used.owner.pod, used.owner.container] = resources
    return given


def resources_of(
    held: Allocation | CheckpointEntry, devices: Mapping[ResourceName, tuple[DeviceID, ...]]
) -> Iterator[ResourceName]:
    """The resources of which an allocation, or an entry of a checkpoint, gives something; of its devices these."""
    yield from devices
    if held.cpus:
        yield CPU
    yield from (block.resource for block in held.memory)


def swaps_of(
    state: NodeState, reservations: Sequence[Reservation], shown: Collection[Part], known: Sequence[Swap]
) -> Iterator[Swap]:
    """
    What the pods to which the `shown` parts belong have got of what is reserved for others, and what is left for these. The
    others may have been heard of later. `known`: the swaps that were found before.
    """
    given = given_by_uid(state)
    used = {(each.resource, each.instead) for each in known}
    for uid, container, resource in sorted({(each.pod_uid, each.container, each.resource) for each in shown}):
        got = given.get((uid, container), {}).get(resource, set())
        own = [each.device for each in shown if (uid, container, resource) == each[:3] and each.device]
        taken = got.difference(own)
        left = [device for device in sorted(own) if device not in got and (resource, device) not in used]
        for other in reservations:
            for part in (part for reserved in other.containers for part in parts(reserved, other.pod_uid)):
                is_taken = part.resource == resource and part.device in taken and part not in shown
                if is_taken and other.pod_uid != uid and left:
                    yield Swap(other.pod_uid, resource, part.device, left.pop(0))


def swapped(reservations: Sequence[Reservation], swaps: Sequence[Swap]) -> tuple[Reservation, ...]:
    """The reservations with other devices in the place of those that were taken."""
    instead = {(each.pod_uid, each.resource, each.taken): each.instead for each in swaps}
    if not instead:
        return tuple(reservations)
    functions = {
        device: addresses
        for reservation in reservations
        for each in reservation.containers
        for device, addresses in each.virtual_functions.items()
    }

    def after(uid: str, reserved: ReservedContainer) -> ReservedContainer:
        devices, companions = (
            {name: tuple(instead.get((uid, name, each), each) for each in ids) for name, ids in had.items()}
            for had in (reserved.devices, reserved.companions)
        )
        now = {device for ids in (*devices.values(), *companions.values()) for device in ids}
        kept = {**functions, **reserved.virtual_functions}
        return msgspec.structs.replace(
            reserved,
            devices=devices,
            companions=companions,
            virtual_functions={device: some for device, some in kept.items() if device in now},
        )

    return tuple(
        msgspec.structs.replace(each, containers=tuple(after(each.pod_uid, part) for part in each.containers))
        for each in reservations
    )
