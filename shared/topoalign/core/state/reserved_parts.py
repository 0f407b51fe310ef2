"""
Splits what is reserved for pods into parts, and finds which of them a node reports and which of them pods have swapped.

`node_reservations` has the rules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.events import ContainerUsage, MemoryBlock
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import CPU, GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import offered_in_slots

PodNames = tuple[Namespace, PodName]


class ReservedPart(NamedTuple):
    """The smallest piece of a reservation that can end by itself."""

    pod_uid: str
    container: ContainerName
    resource: ResourceName
    """Of a device, `cpu`, or of a block of memory."""
    device: DeviceID = DeviceID("")
    """Empty: all of the resource, as of CPUs and memory."""


class Swapped(NamedTuple):
    """A device that was reserved for one pod and given to another, which leaves one that was reserved for itself."""

    pod_uid: str
    """The pod that it was reserved for."""
    resource: ResourceName
    taken: DeviceID
    instead: DeviceID
    amount: Amount | None
    """What the pod that it was reserved for will hold by `instead`, where that is a slot. None: an equal part."""


def reserved_parts_of_container(reserved: ReservedContainer, uid: str) -> Iterator[ReservedPart]:
    """The parts of what is reserved for a container of this pod."""
    for devices in (reserved.devices, reserved.co_allocated):
        yield from (
            ReservedPart(uid, reserved.container, name, device) for name, ids in devices.items() for device in ids
        )
    if reserved.cpus:
        yield ReservedPart(uid, reserved.container, CPU)
    yield from (ReservedPart(uid, reserved.container, block.resource) for block in reserved.memory)


def rest_of(reserved: ReservedContainer, uid: str, shown: frozenset[ReservedPart]) -> ReservedContainer:
    """What is reserved for a container without the parts that are shown."""
    every = {*reserved_parts_of_container(reserved, uid)}
    left = every - shown
    if every and left == every:
        return reserved

    def unseen(devices: Mapping[ResourceName, tuple[DeviceID, ...]]) -> dict[ResourceName, tuple[DeviceID, ...]]:
        rest = {
            name: tuple(device for device in ids if ReservedPart(uid, reserved.container, name, device) in left)
            for name, ids in devices.items()
        }
        return {name: ids for name, ids in rest.items() if ids}

    devices = unseen(reserved.devices)
    co_allocated = unseen(reserved.co_allocated)
    kept = {device for ids in (*devices.values(), *co_allocated.values()) for device in ids}
    return msgspec.structs.replace(
        reserved,
        devices=devices,
        co_allocated=co_allocated,
        virtual_functions={nic: functions for nic, functions in reserved.virtual_functions.items() if nic in kept},
        cpus=reserved.cpus if ReservedPart(uid, reserved.container, CPU) in left else "",
        memory=tuple(each for each in reserved.memory if ReservedPart(uid, reserved.container, each.resource) in left),
        slots={slot: amount for slot, amount in reserved.slots.items() if slot in kept},
    )


def is_something(reserved: ReservedContainer) -> bool:
    """Whether anything is reserved for the container."""
    return bool(reserved.devices or reserved.co_allocated or reserved.cpus or reserved.memory)


def shown_by(
    state: NodeState,
    reservations: Sequence[Reservation],
    former: Mapping[str, Collection[AllocationID]] = {},
    origins: Mapping[AllocationID, AllocationID] = {},
    *,
    own: bool = False,
) -> Iterator[ReservedPart]:
    """
    The parts of these reservations that the node shows as it is now. `former`: UID of a pod -> allocations from before its
    reservation, which show nothing of it by what they hold; `origins`, `own`: as `NodeReservations.observe`.

    What an init container holds shows nothing of the next ones, init containers included: they take it over, and may come
    with more. Of an init container whose devices another took over the record has nothing any more; it has run if a
    later container of the pod has the resource.
    """
    live = state.allocations.values() if own else ()
    holders = {device: each.id for each in live for device in ids_held(each)}
    given = ReportedHoldings(state, co_allocated=False)
    for reservation in reservations:
        before = frozenset(former.get(reservation.pod_uid, ()))
        has = [given.to(reservation, each.container).keys() for each in reservation.containers]
        left = set[DeviceID]()
        for number, reserved in enumerate(reservation.containers):
            later = has[number + 1 :] if own and reserved.role == "init" else []
            resources = set[ResourceName]().union(has[number], *later)
            co_allocated = {device for ids in reserved.co_allocated.values() for device in ids}
            for part in reserved_parts_of_container(reserved, reservation.pod_uid):
                ids = reserved.virtual_functions.get(part.device, (part.device,))
                shown_with = GPU if part.device in co_allocated else part.resource
                held_by = [holders[each] for each in ids if each in holders]
                is_left = part.device in left  # held for an earlier init container, maybe
                is_new = all(before.isdisjoint(with_origins(each, origins)) for each in held_by)
                is_held = len(held_by) == len(ids) and is_new and not is_left
                if shown_with in resources or is_held:
                    yield part
            if reserved.role == "init":
                left.update(ids_reserved(reserved))


def with_origins(name: AllocationID, origins: Mapping[AllocationID, AllocationID]) -> Iterator[AllocationID]:
    """An allocation, and those that it is the rest of, the newest first."""
    found: AllocationID | None = name
    while found is not None:
        yield found
        found = origins.get(found)


def ids_reserved(reserved: ReservedContainer) -> Iterator[DeviceID]:
    """All devices that are reserved for a container."""
    for devices in (reserved.devices, reserved.co_allocated):
        yield from (device for ids in devices.values() for device in ids)


def ids_held(allocation: Allocation) -> Iterator[str]:
    """The ids under which an allocation holds its devices: of a NIC in parts, its virtual functions."""
    for device in allocation.device_ids:
        yield from allocation.virtual_functions.get(device, (device,))


class ReportedHoldings:
    """
    What a node shows containers to have: by its record and by its kubelet's checkpoints, and by PodResources where a
    checkpoint cannot be read. A pod is known by its UID; where the node does not know that, by namespace and name.
    """

    def __init__(self, state: NodeState, *, co_allocated: bool = True) -> None:
        """`co_allocated`: whether what came together with the GPUs counts."""
        self._found: dict[tuple[str | PodNames, ContainerName], dict[ResourceName, set[DeviceID]]] = {}
        for held in state.allocations.values():
            owner = held.owner
            if owner is not None:
                pod = held.pod_uid or (owner.namespace, owner.pod)
                self._add(pod, owner.container, held.devices if co_allocated else held.from_kubelet, held)
        usage = state.usage
        kubelet = usage.kubelet if usage is not None else None
        for entry in kubelet.entries if kubelet is not None else ():
            self._add(entry.pod_uid, entry.container, entry.devices, entry)
        for used in usage.containers if usage is not None else ():
            unreadable = unmatched_of(used, kubelet)
            self._add((used.owner.namespace, used.owner.pod), used.owner.container, unreadable.devices, unreadable)

    def _add(
        self,
        pod: str | PodNames,
        container: ContainerName,
        devices: Mapping[ResourceName, tuple[DeviceID, ...]],
        held: Allocation | CheckpointEntry | ContainerUsage,
    ) -> None:
        found = self._found.setdefault((pod, container), {})
        for resource, ids in devices.items():
            if ids:
                found.setdefault(resource, set()).update(ids)
        for resource in (*((CPU,) if held.cpus else ()), *(block.resource for block in held.memory)):
            found.setdefault(resource, set())

    def to(self, reservation: Reservation, container: ContainerName) -> dict[ResourceName, set[DeviceID]]:
        """The resources that a container of this pod has, with the devices."""
        given: dict[ResourceName, set[DeviceID]] = {}
        for pod in (reservation.pod_uid, (reservation.namespace, reservation.pod)):
            for resource, ids in self._found.get((pod, container), {}).items():
                given[resource] = given.get(resource, set()) | ids
        return given

    def knows(self, uid: str, names: PodNames) -> bool:
        """Whether a container of this pod has anything."""
        return any(given and pod in (uid, names) for (pod, _), given in self._found.items())


def unmatched_of(used: ContainerUsage, kubelet: KubeletObserved | None) -> ContainerUsage:
    """Of what PodResources shows of a container that for which it counts: what no checkpoint contains."""
    unknown = kubelet is None or bool(kubelet.unknown)
    return ContainerUsage(
        owner=used.owner,
        cpus=used.cpus if kubelet is None or unknown or kubelet.cpus_unknown else "",
        memory=used.memory if kubelet is None or unknown or kubelet.memory_unknown else (),
        devices=used.devices if kubelet is None or unknown or kubelet.checkpoint_unknown else {},
    )


def swaps_of(
    state: NodeState,
    reservations: Sequence[Reservation],
    shown: Collection[ReservedPart],
    known: Sequence[Swapped],
    unsaid: Collection[ReservedPart] = (),
) -> Iterator[Swapped]:
    """
    What the pods to which the `shown` parts belong have got of what is reserved for others, and what is left for these. The
    others may have been known later. `known`: the swaps that were found before; `unsaid`: what of `shown` was shown
    before it was known by whom it is held. A pod that gets other devices leaves what one swap has left for it to the next.

    A part of a GPU is swapped for one of the same GPU, if there is one, so that of no GPU more is held than before; else a
    slot for one with the same amount. It is swapped once for all containers of a pod: a later one takes it over from an init
    container. By another slot a pod holds as much as by the one that was taken from it. A percentage is
    another amount of a GPU that offers more or less: of such a GPU it holds what was reserved there for a pod with as many
    slots, because of pods that ask for as many a registry binds at the same time only those that ask for the same.
    """
    given = ReportedHoldings(state)
    pods = {each.pod_uid: each for each in reservations}
    heirs = {(each.resource, each.instead): each.pod_uid for each in known}
    offered = offered_in_slots(state.hardware)
    lost = set[tuple[ResourceName, DeviceID]]()
    for uid, container, resource in sorted({(each.pod_uid, each.container, each.resource) for each in shown}):
        got = given.to(pods[uid], container).get(resource, set())
        own = [each.device for each in shown if (uid, container, resource) == each[:3] and each.device]
        taken = {device for device in got.difference(own) if (resource, device) not in lost}
        left = [device for device in sorted(own) if device not in got and heirs.get((resource, device), uid) == uid]
        amounts = {slot: amount for each in pods[uid].containers for slot, amount in each.slots.items()}
        for other in reservations:
            for reserved, part in (
                (each, part) for each in other.containers for part in reserved_parts_of_container(each, other.pod_uid)
            ):
                is_taken = part.resource == resource and part.device in taken
                if is_taken and (part not in shown or part in unsaid) and other.pod_uid != uid and left:
                    gpu = base_of(part.device)
                    asked = reserved.slots.get(part.device)
                    instead = min(left, key=lambda each: (base_of(each) != gpu, amounts.get(each) != asked))
                    left.remove(instead)
                    taken.remove(part.device)
                    heirs[resource, instead] = other.pod_uid
                    lost.add((resource, part.device))
                    is_alike = offered.get(base_of(part.device)) == offered.get(base_of(instead))
                    listed = [each.devices.get(resource, ()) for each in other.containers]
                    is_as_many = any(part.device in ids and len(ids) == len(own) for ids in listed)
                    follows_slot = is_as_many and not is_alike
                    amount = amounts.get(instead) if follows_slot else asked
                    yield Swapped(other.pod_uid, resource, part.device, instead, amount)


def swap_devices(
    reservations: Sequence[Reservation], swaps: Sequence[Swapped], shown: Collection[ReservedPart]
) -> tuple[Reservation, ...]:
    """
    The reservations with other devices in the place of those that were taken; parts that are `shown` are as they were. CPUs
    and memory go with the devices: a kubelet that gives a container the devices of another one aligned it where the other
    was to be aligned.
    """
    instead = {(each.pod_uid, each.resource, each.taken): each.instead for each in swaps}
    if not instead:
        return tuple(reservations)
    every = [each for reservation in reservations for each in reservation.containers]
    functions = {device: addresses for each in every for device, addresses in each.virtual_functions.items()}
    amounts = {(each.pod_uid, each.instead): each.amount for each in swaps}
    donors = {device: each for each in every for device in ids_reserved(each)}

    def after(uid: str, reserved: ReservedContainer) -> ReservedContainer:
        def now_of(name: ResourceName, device: DeviceID) -> DeviceID:
            is_shown = ReservedPart(uid, reserved.container, name, device) in shown
            return device if is_shown else instead.get((uid, name, device), device)

        devices, co_allocated = (
            {name: tuple(now_of(name, each) for each in ids) for name, ids in had.items()}
            for had in (reserved.devices, reserved.co_allocated)
        )
        now = {device for ids in (*devices.values(), *co_allocated.values()) for device in ids}
        kept = {**functions, **reserved.virtual_functions}
        by_slot = {device: reserved.slots.get(device) or amounts.get((uid, device)) for device in now}
        got = [donors.get(device, reserved) for device in sorted(now.difference(ids_reserved(reserved)))]
        donor = got[0] if got and all(each is got[0] for each in got) else reserved
        has_cpus = ReservedPart(uid, reserved.container, CPU) in shown
        moves_cpus = not has_cpus and len(parse_cpuset(donor.cpus)) == len(parse_cpuset(reserved.cpus))
        return msgspec.structs.replace(
            reserved,
            devices=devices,
            co_allocated=co_allocated,
            virtual_functions={device: some for device, some in kept.items() if device in now},
            slots={slot: amount for slot, amount in by_slot.items() if amount is not None},
            cpus=donor.cpus if moves_cpus else reserved.cpus,
            memory=moved_memory(
                reserved, donor, {each.resource for each in shown if each[:2] == (uid, reserved.container)}
            ),
        )

    return tuple(
        msgspec.structs.replace(each, containers=tuple(after(each.pod_uid, part) for part in each.containers))
        for each in reservations
    )


def moved_memory(
    reserved: ReservedContainer, donor: ReservedContainer, shown: Collection[ResourceName]
) -> tuple[MemoryBlock, ...]:
    """The memory that a container will get where the donor was to be; of resources that are `shown` what it has."""
    given_up = {block.resource: block for block in donor.memory}

    def after(block: MemoryBlock) -> MemoryBlock:
        other = given_up.get(block.resource)
        is_moved = other is not None and other.size == block.size and block.resource not in shown
        return other if is_moved and other is not None else block

    return tuple(map(after, reserved.memory))
