"""
Folds `ReservationsChanged` and the reports of the node into the reservations of one node.

The newest message contains all reservations of the node. A reservation lasts for the number of seconds in the message,
measured from receipt by the reader's monotonic clock. A later message that repeats it does not extend it. Its parts are
each device, the CPUs, and each kind of memory of a container. A part ends when the node reports it: the container has
the resource in an allocation or a checkpoint entry, regardless of which devices it got. If a checkpoint cannot be read,
the PodResources API is used instead. If the node does not know the pod's UID, the pod is identified by its namespace
and name. The part of a co-allocated device ends when the node reports the GPUs of its container. A reported part stays
reported after its container has ended. The registry's assumed pods end by the same rule.

On the node itself, any new allocation of a reserved device reports it (`observe`). For other readers, such as a
registry, an allocation of another or an unknown owner does not: their state can be outdated, and the allocation might
belong to a pod that held the device before.

Example: GPU-0 and CPUs 0-3 are reserved for pod a, and GPU-1 and CPUs 4-7 for pod b, which has the same request. The
node reports CPUs 4-7 for a, so that only GPU-0 stays reserved for a. Then it reports GPU-1 for a, because the kubelet
cannot distinguish equal pods. The reservation of a is consumed, and GPU-0 and CPUs 0-3 are now reserved for b.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import AllocationID, DeviceID, Namespace, PodName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reserved_parts import (
    ReservedPart,
    Swapped,
    is_something,
    reported_parts,
    rest_of,
    swap_devices,
    swaps_of,
)


class Ended(NamedTuple):
    """UIDs of pods whose reservations have ended and are still in the newest message."""

    consumed: tuple[str, ...]
    expired: tuple[str, ...]


class NodeReservations(msgspec.Struct, frozen=True, kw_only=True):
    """The reservations of one node. Frozen: each method returns the next state."""

    newest: ReservationsChanged | None = None
    """The newest message; None: there is none."""
    position: int = 0
    """Position of the newest message in the stream. The next change is based on it. 0: there is no message."""
    until: Mapping[str, float] = {}
    """UID of the pod -> monotonic second at which its reservation ends."""
    reservations: tuple[Reservation, ...] = ()
    """All reservations of the newest message, including ended ones, after the swaps."""
    reported: frozenset[ReservedPart] = frozenset()
    unconfirmed: frozenset[ReservedPart] = frozenset()
    """Reported parts in allocations whose owner is unknown so far. The owner might be another pod."""
    swaps: tuple[Swapped, ...] = ()
    former: Mapping[str, frozenset[AllocationID]] = {}
    """UID of the pod -> the allocations that were live when its reservation was received."""

    def apply(
        self, event: ReservationsChanged, position: int, now: float, live: Collection[AllocationID] = ()
    ) -> "NodeReservations":
        """
        Returns the state after this message, which must be the newest and was received at monotonic second `now`.
        `live`: the live allocations in the node's own record at that moment.
        """
        newest = self.newest
        is_repeated = newest is not None and (newest.writer, newest.epoch, newest.seq) == (
            event.writer,
            event.epoch,
            event.seq,
        )
        made = () if is_repeated else event.made
        until = {each.pod_uid: now + each.seconds_left for each in event.reservations}
        kept = (self.until.keys() & until.keys()) - {*made}
        until |= {uid: min(until[uid], self.until[uid]) for uid in kept}
        reported = frozenset(part for part in self.reported if part.pod_uid in kept)
        swaps = tuple(each for each in self.swaps if each.pod_uid in kept)
        former = {uid: before for uid, before in self.former.items() if uid in kept}
        return NodeReservations(
            newest=event,
            position=position,
            until=until,
            reservations=swap_devices(event.reservations, swaps, reported),
            reported=reported,
            unconfirmed=self.unconfirmed & reported,
            swaps=swaps,
            former=dict.fromkeys(until, frozenset(live)) | former if live else former,
        )

    def observe(
        self, state: NodeState, origins: Mapping[AllocationID, AllocationID] = {}, *, own: bool = False
    ) -> "NodeReservations":
        """
        Returns the reservations after this state of the node; this object if the state reports no further part.

        `own`: the state is the node's own record, which is never outdated. Then any allocation that holds a device
        reports it as well, except one that was live before the reservation: its container has ended, or ends before the
        reserved pod is admitted. `origins`: the remainder of a partly released allocation -> that allocation.
        """
        if not self.reservations:
            return self
        found = frozenset(reported_parts(state, self.reservations, self.former, origins, own=own)) - self.reported
        reported = self.reported | found
        unconfirmed = self.unconfirmed
        if own and (found or unconfirmed):
            confirmed = reported_parts(state, self.reservations, self.former, origins)
            unconfirmed = (unconfirmed | found).difference(confirmed)
        swaps = tuple(swaps_of(state, self.reservations, reported, self.swaps, unconfirmed)) if reported else ()
        if not found and not swaps and unconfirmed == self.unconfirmed:
            return self
        taken = {(each.pod_uid, each.resource, each.taken) for each in swaps}
        reported -= {part for part in unconfirmed if (part.pod_uid, part.resource, part.device) in taken}
        return msgspec.structs.replace(
            self,
            reported=reported,
            unconfirmed=unconfirmed & reported,
            swaps=(*self.swaps, *swaps),
            reservations=swap_devices(self.reservations, swaps, reported),
        )

    def held(self, now: float) -> tuple[Reservation, ...]:
        """The reservations that are valid at `now`, with only the parts that are not reported."""
        rest = (self._rest(each, now) for each in self.reservations)
        return tuple(each for each in rest if each.seconds_left > 0 and each.containers)

    def ended(self, now: float) -> Ended:
        """The reservations that have ended at `now` and are still in the newest message."""
        rest = [self._rest(each, now) for each in self.reservations]
        consumed = tuple(each.pod_uid for each in rest if not each.containers)
        expired = tuple(each.pod_uid for each in rest if each.containers and each.seconds_left <= 0)
        return Ended(consumed, expired)

    def _rest(self, reservation: Reservation, now: float) -> Reservation:
        rest = tuple(rest_of(each, reservation.pod_uid, self.reported) for each in reservation.containers)
        return msgspec.structs.replace(
            reservation,
            containers=tuple(each for each in rest if is_something(each)),
            seconds_left=max(0.0, self.until[reservation.pod_uid] - now),
        )


def in_order_of_binds(
    held: Sequence[Reservation], made: Sequence[Reservation], cancelled: Collection[str] = ()
) -> tuple[Reservation, ...]:
    """
    All reservations of a node after a change. A pod's new reservation replaces its former one. Reservations of pods
    that are about to be bound come before those planned for a gang, because agents of all versions search the
    reservations in this order when they answer the kubelet.
    """
    new = {each.pod_uid: each for each in made}
    gone = frozenset(cancelled) - new.keys()
    kept = [new.pop(each.pod_uid, each) for each in held if each.pod_uid not in gone]
    return tuple(sorted((*kept, *new.values()), key=lambda each: each.planned))


def with_reserved(state: NodeState, facts: NodeState, reservations: Sequence[Reservation]) -> NodeState:
    """Returns this state with all reservations held, except the parts that `facts` already reports."""
    message = ReservationsChanged(node=state.node, epoch=0, seq=0, writer="", reservations=tuple(reservations))
    for each in NodeReservations().apply(message, 0, 0.0).observe(facts).held(0.0):
        state = holding_reserved(state, each)
    return state


def holding_reserved(state: NodeState, reservation: Reservation) -> NodeState:
    """Returns this state with a pod's reservation held, except the devices and CPUs that are already held."""
    for reserved in reserved_allocations(reservation):
        left = not_given(reserved, state)
        if left.devices or left.cpus or left.memory:
            state = state.holding(left)
    return state


def not_given(reserved: Allocation, state: NodeState) -> Allocation:
    """A reserved allocation without the devices, virtual functions and CPUs that are already held in this state."""
    owned = state.ownership
    functions = {
        nic: tuple(each for each in addresses if each not in owned.functions_in_use)
        for nic, addresses in reserved.virtual_functions.items()
        if nic not in owned.held_whole
    }

    def is_left(device: DeviceID) -> bool:
        return bool(functions.get(device)) if device in reserved.virtual_functions else not owned.is_held(device)

    devices = {name: tuple(filter(is_left, ids)) for name, ids in reserved.devices.items()}
    return msgspec.structs.replace(
        reserved,
        devices={name: ids for name, ids in devices.items() if ids},
        co_allocated=tuple(filter(is_left, reserved.co_allocated)),
        slots={slot: amount for slot, amount in reserved.slots.items() if is_left(slot)},
        virtual_functions={nic: addresses for nic, addresses in functions.items() if addresses},
        cpus=format_cpuset(reserved.cpu_ids - owned.cpus_in_use),
    )


def reservation_of(
    uid: str,
    pod: PodRequest,
    allocations: Sequence[Allocation],
    seconds: float,
    gang: str = "",
    *,
    needs_co_allocated: bool = False,
    may_move: bool = False,
) -> Reservation:
    """
    The reservation for what a decision gives a pod, for this number of seconds. `needs_co_allocated`: the containers
    must not start without their co-allocated devices. `may_move`: as in `ReservedContainer`, for containers with slots.
    """
    containers = []
    for each in allocations:
        if each.owner is None:
            continue
        co_allocated = {
            name: tuple(device for device in ids if device in each.co_allocated) for name, ids in each.devices.items()
        }
        reserved = ReservedContainer(
            container=each.owner.container,
            role=each.role,
            devices=dict(each.from_kubelet),
            co_allocated={name: ids for name, ids in co_allocated.items() if ids},
            needs_co_allocated=needs_co_allocated and bool(each.co_allocated),
            virtual_functions=each.virtual_functions,
            cpus=each.cpus,
            memory=each.memory,
            slots=each.slots,
            may_move=may_move and bool(each.slots),
        )
        if is_something(reserved):
            containers.append(reserved)
    return Reservation(
        pod_uid=uid,
        namespace=pod.namespace,
        pod=pod.name,
        containers=tuple(containers),
        seconds_left=seconds,
        gang=gang,
    )


def reserved_allocations(reservation: Reservation) -> tuple[Allocation, ...]:
    """
    What the containers of a reservation will hold, as allocations, for a decision about another pod. Their owner has
    the pod's UID as its name, so that a recreated pod with the same name holds none of them.
    """
    found = []
    for reserved in reservation.containers:
        devices = {
            name: (*reserved.devices.get(name, ()), *reserved.co_allocated.get(name, ()))
            for name in {**reserved.devices, **reserved.co_allocated}
        }
        from_kubelet = {device for ids in reserved.devices.values() for device in ids}
        allocation = Allocation(
            id=AllocationID(f"reserved/{reservation.pod_uid}/{reserved.container}"),
            owner=Owner(namespace=Namespace(""), pod=PodName(reservation.pod_uid), container=reserved.container),
            role=reserved.role,
            devices=devices,
            virtual_functions=reserved.virtual_functions,
            cpus=reserved.cpus,
            memory=reserved.memory,
            lowest_first=bool(reserved.memory),
            pod_uid=reservation.pod_uid,
            co_allocated=tuple(device for ids in reserved.co_allocated.values() for device in ids),
            # a forged message can contain slots that are not among the devices
            slots={slot: amount for slot, amount in reserved.slots.items() if slot in from_kubelet},
        )
        found.append(allocation)
    return tuple(found)
