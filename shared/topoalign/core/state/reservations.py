"""
What is reserved on one node, as one reader knows it: a fold over `ReservationsChanged` and over what the node shows.

The newest message has all reservations of the node. A reservation lasts for the seconds that the message tells, counted
by the reader's own monotonic clock from receipt; a later message that repeats it does not prolong it. It is held part by
part: a device, the CPUs, each kind of memory of a container. A part ends as soon as the node shows it:

- an allocation holds the device;
- an allocation, or an entry of the kubelet's checkpoints, gives the container of this pod the resource, whichever devices
  it got. Companions end with the first devices of their container.

Example: GPU-0 and CPUs 0-3 are reserved for a container. The usage of the node lists CPUs 0-3 for it: GPU-0 alone stays
reserved. An allocation holds GPU-0: the reservation is consumed.

A part that was shown once stays shown, although the container may end before the reservation does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import CPU, AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.requests import PodRequest
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


class Ended(NamedTuple):
    """UIDs of pods whose reservations the newest message still has, though they are over."""

    consumed: tuple[str, ...]
    expired: tuple[str, ...]


class NodeReservations(msgspec.Struct, frozen=True, kw_only=True):
    """The reservations of one node. Frozen: each method returns the next state."""

    newest: ReservationsChanged | None = None
    """The newest message; None: there is none."""
    position: int = 0
    """Its position in the stream, on which the next change is made; 0: there is none."""
    until: Mapping[str, float] = {}
    """UID of the pod -> monotonic second at which its reservation ends."""
    shown: frozenset[Part] = frozenset()
    """What the node has shown of the reservations."""

    def apply(self, event: ReservationsChanged, position: int, now: float) -> "NodeReservations":
        """Returns the state after this message, which is the newest, received at monotonic second `now`."""
        until = {each.pod_uid: now + each.seconds_left for each in event.reservations}
        until |= {
            uid: min(end, self.until[uid]) for uid, end in until.items() if uid in self.until and uid not in event.made
        }
        shown = frozenset(part for part in self.shown if part.pod_uid in until and part.pod_uid not in event.made)
        return NodeReservations(newest=event, position=position, until=until, shown=shown)

    def observe(self, state: NodeState) -> "NodeReservations":
        """Returns the state after the node was seen so; the same one if nothing more is shown."""
        found = frozenset(shown_by(state, self.reservations)) - self.shown
        return msgspec.structs.replace(self, shown=self.shown | found) if found else self

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """All that the newest message has, also those that have ended since."""
        return self.newest.reservations if self.newest is not None else ()

    def held(self, now: float) -> tuple[Reservation, ...]:
        """What is to be held at monotonic second `now`: reservations that last, with those parts that are not shown."""
        rest = (self._rest(each, now) for each in self.reservations)
        return tuple(each for each in rest if each.seconds_left > 0 and each.containers)

    def ended(self, now: float) -> Ended:
        """What has ended at monotonic second `now` and is still in the newest message."""
        rest = [self._rest(each, now) for each in self.reservations]
        consumed = tuple(each.pod_uid for each in rest if not each.containers)
        expired = tuple(each.pod_uid for each in rest if each.containers and each.seconds_left <= 0)
        return Ended(consumed, expired)

    def _rest(self, reservation: Reservation, now: float) -> Reservation:
        """The parts of a reservation that are not shown, and how long it lasts."""
        rest = tuple(rest_of(each, reservation.pod_uid, self.shown) for each in reservation.containers)
        return msgspec.structs.replace(
            reservation,
            containers=tuple(each for each in rest if is_something(each)),
            seconds_left=max(0.0, self.until[reservation.pod_uid] - now),
        )


def with_reserved(state: NodeState, facts: NodeState, reservations: Sequence[Reservation]) -> NodeState:
    """
    Returns this state of a node with what is reserved on it as held. `facts`: the node as it says, by which parts are left
    out that pods have already.
    """
    shown = frozenset(shown_by(facts, reservations))
    for each in reservations:
        rest = tuple(rest_of(reserved, each.pod_uid, shown) for reserved in each.containers)
        left = msgspec.structs.replace(each, containers=tuple(one for one in rest if is_something(one)))
        for allocation in allocations_of(left):
            state = state.holding(allocation)
    return state


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


def shown_by(state: NodeState, reservations: Sequence[Reservation]) -> Iterator[Part]:
    """The parts of these reservations that the node shows as it is now."""
    held = {device for allocation in state.allocations.values() for device in ids_held(allocation)}
    given = given_by_uid(state)
    by_name = given_by_name(state)
    for reservation in reservations:
        for reserved in reservation.containers:
            owner = (reservation.namespace, reservation.pod, reserved.container)
            resources = given.get((reservation.pod_uid, reserved.container), set()) | by_name.get(owner, set())
            has_devices = not resources.isdisjoint(reserved.devices)
            for part in parts(reserved, reservation.pod_uid):
                ids = reserved.virtual_functions.get(part.device, (part.device,))
                is_companion = part.resource not in reserved.devices and part.device != ""
                if part.resource in resources or (is_companion and has_devices) or held.issuperset(ids):
                    yield part


def ids_held(allocation: Allocation) -> Iterator[str]:
    """The ids under which an allocation holds its devices: of a NIC in parts, its virtual functions."""
    for device in allocation.device_ids:
        yield from allocation.virtual_functions.get(device, (device,))


def given_by_uid(state: NodeState) -> dict[tuple[str, ContainerName], set[ResourceName]]:
    """UID of a pod and container -> the resources that the record or the kubelet's checkpoints give it."""
    given: dict[tuple[str, ContainerName], set[ResourceName]] = {}
    for held in state.allocations.values():
        if held.pod_uid and held.owner is not None:
            given.setdefault((held.pod_uid, held.owner.container), set()).update(resources_of(held))
    kubelet = state.usage.kubelet if state.usage is not None else None
    for entry in kubelet.entries if kubelet is not None else ():
        given.setdefault((entry.pod_uid, entry.container), set()).update(resources_of(entry))
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


def resources_of(held: Allocation | CheckpointEntry) -> Iterator[ResourceName]:
    """The resources of which an allocation, or an entry of a checkpoint, gives something."""
    yield from held.devices
    if held.cpus:
        yield CPU
    yield from (block.resource for block in held.memory)


def reservation_of(
    uid: str, pod: PodRequest, allocations: Sequence[Allocation], seconds: float, gang: str = ""
) -> Reservation:
    """
    What a decision gives a pod, as its reservation for so many seconds. What a container gets beyond what it asks the
    kubelet for are companions.
    """
    asked = {each.name: {**each.requests, **each.limits} for each in (*pod.init_containers, *pod.containers)}
    return Reservation(
        pod_uid=uid,
        namespace=pod.namespace,
        pod=pod.name,
        containers=tuple(
            reserved
            for each in allocations
            if each.owner is not None
            and is_something(reserved := reserved_container(each, each.owner, asked.get(each.owner.container, {})))
        ),
        seconds_left=seconds,
        gang=gang,
    )


def reserved_container(allocation: Allocation, owner: Owner, asked: Mapping[ResourceName, int]) -> ReservedContainer:
    """What a decision gives one container."""
    devices = {name: ids[: asked.get(name, 0)] for name, ids in allocation.devices.items()}
    companions = {name: ids[asked.get(name, 0) :] for name, ids in allocation.devices.items()}
    return ReservedContainer(
        container=owner.container,
        role=allocation.role,
        devices={name: ids for name, ids in devices.items() if ids},
        companions={name: ids for name, ids in companions.items() if ids},
        virtual_functions=allocation.virtual_functions,
        cpus=allocation.cpus,
        memory=allocation.memory,
    )


def allocations_of(reservation: Reservation) -> tuple[Allocation, ...]:
    """
    What the containers of a reservation will hold, as allocations, for a decision about another pod. Their owner is the
    pod's UID: a pod that is created again under its name holds none of them.
    """
    return tuple(
        Allocation(
            id=AllocationID(f"reserved/{reservation.pod_uid}/{reserved.container}"),
            owner=Owner(namespace=Namespace(""), pod=PodName(reservation.pod_uid), container=reserved.container),
            role=reserved.role,
            devices={
                name: (*reserved.devices.get(name, ()), *reserved.companions.get(name, ()))
                for name in (*reserved.devices, *(each for each in reserved.companions if each not in reserved.devices))
            },
            virtual_functions=reserved.virtual_functions,
            cpus=reserved.cpus,
            memory=reserved.memory,
            lowest_first=bool(reserved.memory),
            pod_uid=reservation.pod_uid,
        )
        for reserved in reservation.containers
    )
