"""
Splits reservations into parts. Finds the parts that the node reports as allocated, and pairs of pods of which each got
a device that was reserved for the other.

`node_reservations` has the rules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.events import MemoryBlock
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import CPU, GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import offered_in_slots

PodNames = tuple[Namespace, PodName]


class ReservedPart(NamedTuple):
    """The smallest part of a reservation that can end separately."""

    pod_uid: str
    container: ContainerName
    resource: ResourceName
    """The resource of the device, `cpu`, or the resource of a memory block."""
    device: DeviceID = DeviceID("")
    """Empty for CPUs and memory: all of the resource is one part."""


class Swapped(NamedTuple):
    """A device that was reserved for one pod and allocated to another, and the one that the first pod gets instead."""

    pod_uid: str
    """The pod for which `taken` was reserved, and for which `instead` is reserved now."""
    resource: ResourceName
    taken: DeviceID
    instead: DeviceID
    amount: Amount | None
    """The amount that the pod will hold with the slot `instead`. None: an equal part of the GPU."""


def parts_of_container(reserved: ReservedContainer, uid: str) -> Iterator[ReservedPart]:
    """The parts of the reservation for a container of this pod."""
    for devices in (reserved.devices, reserved.co_allocated):
        yield from (
            ReservedPart(uid, reserved.container, name, device) for name, ids in devices.items() for device in ids
        )
    if reserved.cpus:
        yield ReservedPart(uid, reserved.container, CPU)
    yield from (ReservedPart(uid, reserved.container, block.resource) for block in reserved.memory)


def rest_of(reserved: ReservedContainer, uid: str, reported: frozenset[ReservedPart]) -> ReservedContainer:
    """The reservation for a container, without the reported parts."""
    every = {*parts_of_container(reserved, uid)}
    left = every - reported
    if every and left == every:
        return reserved

    def rest(devices: Mapping[ResourceName, tuple[DeviceID, ...]]) -> dict[ResourceName, tuple[DeviceID, ...]]:
        found = {
            name: tuple(device for device in ids if ReservedPart(uid, reserved.container, name, device) in left)
            for name, ids in devices.items()
        }
        return {name: ids for name, ids in found.items() if ids}

    devices = rest(reserved.devices)
    co_allocated = rest(reserved.co_allocated)
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


def reported_parts(
    state: NodeState,
    reservations: Sequence[Reservation],
    former: Mapping[str, Collection[AllocationID]] = {},
    origins: Mapping[AllocationID, AllocationID] = {},
    *,
    own: bool = False,
) -> Iterator[ReservedPart]:
    """
    The parts of these reservations that the node reports as allocated in this state. `former`: pod UID -> allocations
    that are older than its reservation and do not count; `origins`, `own`: see `NodeReservations.observe`.
    """
    if not reservations:
        return
    holders = {device: each.id for each in state.allocations.values() for device in ids_held(each)} if own else {}
    holdings = ReportedHoldings(state, co_allocated=False)
    for reservation in reservations:
        before = frozenset(former.get(reservation.pod_uid, ()))
        has = [holdings.to(reservation, each.container).keys() for each in reservation.containers]
        left_by_init = set[DeviceID]()
        for number, reserved in enumerate(reservation.containers):
            # If a later container reuses all devices of an init container, only the later one has an allocation.
            later = has[number + 1 :] if own and reserved.role == "init" else []
            resources = set[ResourceName]().union(has[number], *later)
            co_allocated = {device for ids in reserved.co_allocated.values() for device in ids}
            for part in parts_of_container(reserved, reservation.pod_uid):
                ids = reserved.virtual_functions.get(part.device, (part.device,))
                held_by = [holders[each] for each in ids if each in holders]
                is_new = all(before.isdisjoint(_with_origins(each, origins)) for each in held_by)
                is_held = len(held_by) == len(ids) and is_new and part.device not in left_by_init
                if is_held or (GPU if part.device in co_allocated else part.resource) in resources:
                    yield part
            if reserved.role == "init":
                left_by_init.update(ids_reserved(reserved))


def _with_origins(name: AllocationID, origins: Mapping[AllocationID, AllocationID]) -> Iterator[AllocationID]:
    found: AllocationID | None = name
    while found is not None:
        yield found
        found = origins.get(found)


def ids_reserved(reserved: ReservedContainer) -> Iterator[DeviceID]:
    """All devices that are reserved for a container."""
    for devices in (reserved.devices, reserved.co_allocated):
        yield from (device for ids in devices.values() for device in ids)


def ids_held(allocation: Allocation) -> Iterator[str]:
    """The ids of the devices that an allocation holds; for a NIC that is shared by SR-IOV, of its virtual functions."""
    for device in allocation.device_ids:
        yield from allocation.virtual_functions.get(device, (device,))


class ReportedHoldings:
    """
    What each container holds, according to the ledger and the kubelet's checkpoints or, if a checkpoint cannot be read,
    to PodResources. A pod is identified by its UID or, if the node does not know the UID, by namespace and name.
    """

    def __init__(self, state: NodeState, *, co_allocated: bool = True) -> None:
        """`co_allocated`: whether co-allocated devices count."""
        self._found: dict[tuple[str | PodNames, ContainerName], dict[ResourceName, set[DeviceID]]] = {}
        for held in state.allocations.values():
            owner = held.owner
            if owner is not None:
                devices = held.devices if co_allocated else held.from_kubelet
                self._add(
                    held.pod_uid or (owner.namespace, owner.pod), owner.container, devices, held.cpus, held.memory
                )
        if state.usage is None:
            return
        kubelet = state.usage.kubelet
        for entry in kubelet.entries if kubelet is not None else ():
            self._add(entry.pod_uid, entry.container, entry.devices, entry.cpus, entry.memory)
        for used in state.usage.containers:
            # only the resources whose checkpoint could not be read
            self._add(
                (used.owner.namespace, used.owner.pod),
                used.owner.container,
                used.devices if kubelet is None or kubelet.unknown or kubelet.checkpoint_unknown else {},
                used.cpus if kubelet is None or kubelet.unknown or kubelet.cpus_unknown else "",
                used.memory if kubelet is None or kubelet.unknown or kubelet.memory_unknown else (),
            )

    def _add(
        self,
        pod: str | PodNames,
        container: ContainerName,
        devices: Mapping[ResourceName, tuple[DeviceID, ...]],
        cpus: str,
        memory: Sequence[MemoryBlock],
    ) -> None:
        found = self._found.setdefault((pod, container), {})
        for resource, ids in devices.items():
            if ids:
                found.setdefault(resource, set()).update(ids)
        for resource in (*((CPU,) if cpus else ()), *(block.resource for block in memory)):
            found.setdefault(resource, set())

    def to(self, reservation: Reservation, container: ContainerName) -> dict[ResourceName, set[DeviceID]]:
        """Resource that a container of this pod has -> its devices."""
        given: dict[ResourceName, set[DeviceID]] = {}
        for pod in (reservation.pod_uid, (reservation.namespace, reservation.pod)):
            for resource, ids in self._found.get((pod, container), {}).items():
                given[resource] = given.get(resource, set()) | ids
        return given

    def knows(self, uid: str, names: PodNames) -> bool:
        """Whether a container of this pod has anything."""
        return any(given and pod in (uid, names) for (pod, _), given in self._found.items())


def swaps_of(
    state: NodeState,
    reservations: Sequence[Reservation],
    reported: Collection[ReservedPart],
    known: Sequence[Swapped],
    unconfirmed: Collection[ReservedPart] = (),
) -> Iterator[Swapped]:
    """
    Finds each device that pod A, which has `reported` parts, got although it was reserved for pod B. Instead, B gets a
    device that was reserved for A and that A did not get.

    `known`: the swaps that were found before; `unconfirmed`: reported parts whose holder was unknown.
    """
    holdings = ReportedHoldings(state)
    pods = {each.pod_uid: each for each in reservations}
    offered = offered_in_slots(state.hardware)
    open_parts = [
        (other, reserved, part)
        for other in reservations
        for reserved in other.containers
        for part in parts_of_container(reserved, other.pod_uid)
        if part not in reported or part in unconfirmed
    ]
    successors = {(each.resource, each.instead): each.pod_uid for each in known}
    swapped = set[tuple[ResourceName, DeviceID]]()
    for uid, container, resource in sorted({(each.pod_uid, each.container, each.resource) for each in reported}):
        has = holdings.to(pods[uid], container).get(resource, set())
        own = [each.device for each in reported if (uid, container, resource) == each[:3] and each.device]
        taken = {device for device in has.difference(own) if (resource, device) not in swapped}
        unneeded = [
            device for device in sorted(own) if device not in has and successors.get((resource, device), uid) == uid
        ]
        amounts = {slot: amount for each in pods[uid].containers for slot, amount in each.slots.items()}
        for other, reserved, part in open_parts:
            if part.resource != resource or part.device not in taken or other.pod_uid == uid or not unneeded:
                continue
            # Preferably a device of the same GPU: then the amount held on each GPU does not change. Otherwise a slot with
            # the same amount.
            gpu = base_of(part.device)
            amount = reserved.slots.get(part.device)
            instead = min(unneeded, key=lambda each: (base_of(each) != gpu, amounts.get(each) != amount))
            unneeded.remove(instead)
            taken.remove(part.device)
            successors[resource, instead] = other.pod_uid
            # One swap per device is enough for all containers of the pod, because a later container takes the device over
            # from an init container.
            swapped.add((resource, part.device))
            # Pod B normally keeps its amount. Exception: A and B have the same number of slots and the two GPUs offer
            # different amounts. Then both requested the same percentage (a registry binds such pods at the same time only
            # if their requests are equal), so B gets the amount that was reserved for A on that GPU.
            listed = [each.devices.get(resource, ()) for each in other.containers]
            is_as_many = any(part.device in ids and len(ids) == len(own) for ids in listed)
            if is_as_many and offered.get(gpu) != offered.get(base_of(instead)):
                amount = amounts.get(instead)
            yield Swapped(other.pod_uid, resource, part.device, instead, amount)


def swap_devices(
    reservations: Sequence[Reservation], swaps: Sequence[Swapped], reported: Collection[ReservedPart]
) -> tuple[Reservation, ...]:
    """
    The reservations, with each taken device replaced by its `instead`. Reported parts stay as they are. CPUs and memory
    move with the devices: a kubelet that gave A the devices of B aligned A to the NUMA nodes that were predicted for B.
    """
    instead = {(each.pod_uid, each.resource, each.taken): each.instead for each in swaps}
    if not instead:
        return tuple(reservations)
    every = [each for reservation in reservations for each in reservation.containers]
    functions = {device: addresses for each in every for device, addresses in each.virtual_functions.items()}
    amounts = {(each.pod_uid, each.instead): each.amount for each in swaps}
    reserved_for = {device: each for each in every for device in ids_reserved(each)}

    def swap(uid: str, reserved: ReservedContainer) -> ReservedContainer:
        def current(name: ResourceName, device: DeviceID) -> DeviceID:
            is_reported = ReservedPart(uid, reserved.container, name, device) in reported
            return device if is_reported else instead.get((uid, name, device), device)

        devices, co_allocated = (
            {name: tuple(current(name, each) for each in ids) for name, ids in had.items()}
            for had in (reserved.devices, reserved.co_allocated)
        )
        now = {device for ids in (*devices.values(), *co_allocated.values()) for device in ids}
        kept = {**functions, **reserved.virtual_functions}
        by_slot = {device: reserved.slots.get(device) or amounts.get((uid, device)) for device in now}
        # the container for which all of the new devices were reserved, if there is exactly one
        others = [reserved_for.get(device, reserved) for device in sorted(now.difference(ids_reserved(reserved)))]
        other = others[0] if others and all(each is others[0] for each in others) else reserved
        has = {each.resource for each in reported if each[:2] == (uid, reserved.container)}
        moves_cpus = CPU not in has and len(parse_cpuset(other.cpus)) == len(parse_cpuset(reserved.cpus))
        blocks = {block.resource: block for block in other.memory if block.resource not in has}
        moved = ((block, blocks.get(block.resource)) for block in reserved.memory)
        return msgspec.structs.replace(
            reserved,
            devices=devices,
            co_allocated=co_allocated,
            virtual_functions={device: some for device, some in kept.items() if device in now},
            slots={slot: amount for slot, amount in by_slot.items() if amount is not None},
            cpus=other.cpus if moves_cpus else reserved.cpus,
            memory=tuple(new if new is not None and new.size == had.size else had for had, new in moved),
        )

    return tuple(
        msgspec.structs.replace(each, containers=tuple(swap(each.pod_uid, part) for part in each.containers))
        for each in reservations
    )
