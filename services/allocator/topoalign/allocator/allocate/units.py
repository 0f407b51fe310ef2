"""
Shares of GPUs that are offered in units, over the kubelet's protocol.

A kubelet asks for a container's computing time and for its memory one after the other, in any order, and does not say for
which container. Both have to be of one GPU, and of a GPU of which one container has all computing time nobody else has
anything.

- GetPreferredAllocation: what is reserved for such a question, if the other half is on its GPU; else units of the GPU of the
  newest grant, if that may lack its other half; else of the GPU that `preferred_units` chooses, for the share of a
  container that waits for as many, or for these units and an equal part of the other kind. A whole GPU is followed by
  nothing, and follows nothing, but by a reservation.
- Allocate: units of several GPUs are refused, but for whole GPUs and memory that is reserved with them, and equal parts of
  several as they are reserved. So is the memory of a share whose computing time was given just before, of another GPU, and
  what a container that waits for as many of several GPUs would have instead.
- Allocate, by the record (`grants`): a whole GPU is refused while anybody has units of it, and units while somebody has it
  whole. Records that have ended make way; those that are reserved for one pod do not count against each other.
- PreStartContainer (`share_starts`): the kubelet's checkpoint has by then what each container was given.

Which grant may lack its other half is not in the record: an agent that has just started knows none.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import NamedTuple

from topoalign.allocator.ports import AskedDevices, Listing, Poll
from topoalign.allocator.preferred_units import followed, gpus_for, shares_asked
from topoalign.allocator.reconciliation.liveness import Liveness
from topoalign.core.demand.units import Share, UnitFields, check_share, unit_of
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import UnitKind, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.sparing import held_among, overlapping
from topoalign.core.ports import Clock
from topoalign.core.sharing.refusals import ShareSplit
from topoalign.core.sharing.reserved_units import (
    OpenHalf,
    ShareQuestion,
    are_together,
    given_half,
    has_others,
    has_whole,
    is_all_of,
    is_spread,
    needs_memory,
    reservations_of,
    reserved_units,
    spread_for,
    with_reserved_shares,
)
from topoalign.core.sharing.units import check_gpus, units_on
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.unit_amounts import holder_of

OPEN_SECONDS = 5.0
"""For so long the other half of a share may follow a grant; the kubelet needs milliseconds."""
FIELD = "devices_ids"


class Newest(NamedTuple):
    """The newest grant of units."""

    id: AllocationID
    at: float
    """Monotonic seconds."""
    is_second: bool
    """Whether it may be the second half of the one before, which was of the same GPUs."""
    pods: frozenset[str]
    """UIDs of the pods that it may be for (`Asking`)."""


class Asking(NamedTuple):
    """For whom the kubelet may ask."""

    pods: frozenset[str]
    """Of pods the UIDs, and of those with a reservation the names, as in `unit_amounts.Holder`."""
    records: frozenset[AllocationID]
    """What may be the other half of what it asks for, of which no owner is known."""


class Shares:
    """Knows which grant of units was the newest, and judges others by it and by what is reserved."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        clock: Clock,
        reserved: Callable[[], NodeReservations],
        liveness: Liveness,
        compat: str,
    ) -> None:
        """`reserved`: what is reserved on the node now. `compat`: as in the rules of the node."""
        self._state, self._clock, self._reserved, self._liveness = state, clock, reserved, liveness
        self._compat = compat
        self._newest: Newest | None = None
        """The newest grant of units."""
        self._split = 0
        """Units of computing time of the last share of which the memory was refused."""

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """Notes what a call for this resource was given. `poll`: what the kubelet answered before, if it was asked."""
        for answer in answers:
            units = answer.from_kubelet.get(resource, ())
            if (kind := kind_of(units)) is None:
                return
            before = self.open_half(kind, poll)
            pods = self._asking(resource, units, poll, before).pods
            is_second = before is not None and before.allocation.amounts.keys() == answer.amounts.keys()
            self._newest = Newest(answer.id, self._clock.monotonic(), is_second, pods)

    @property
    def newest(self) -> AllocationID | None:
        """The newest grant of units since the start; None: there was none."""
        return self._newest.id if self._newest is not None else None

    def open_half(self, kind: UnitKind, poll: Poll | None) -> OpenHalf | None:
        """
        The newest grant, where units of this kind may be its other half: a kubelet admits one container after the other.
        None if it has such units, is in the kubelet's checkpoint (as of `poll`), which is written when a container has
        all that it asks for, is older than `OPEN_SECONDS`, or is all that is reserved for a container, which has no other.
        """
        if self._newest is None or self._clock.monotonic() - self._newest.at > OPEN_SECONDS:
            return None
        state = self._state()
        newest = state.allocations.get(self._newest.id)
        if newest is None or newest.pod_uid or has_kind(newest, kind):
            return None
        if poll is not None and self._is_entered(newest, poll.listing):
            return None
        reserved, now = self._reserved(), self._clock.monotonic()
        for resource, units in newest.from_kubelet.items():
            own = [
                (of, container)
                for of, container in reservations_of(reserved, now, resource, units)
                if not has_others(state, of.pod_uid, container, resource, units)
            ]
            lacking = [each for each in own if any(kind_of(ids) == kind for ids in each[1].devices.values())]
            if own and all(given_half(state, of.pod_uid, container, resource) for of, container in lacking):
                return None
        return OpenHalf(newest, not self._newest.is_second and needs_memory(newest))

    def _recent_half(self, kind: UnitKind) -> OpenHalf | None:
        """
        The newest grant, if it may be a first half of units, whatever the checkpoint has: that may be written between two
        halves. For a preference alone.
        """
        if self._newest is None or self._newest.is_second or self._clock.monotonic() - self._newest.at > OPEN_SECONDS:
            return None
        newest = self._state().allocations.get(self._newest.id)
        return None if newest is None or has_kind(newest, kind) else OpenHalf(newest, is_certain=False)

    def _is_entered(self, grant: Allocation, listing: Listing) -> bool:
        """Whether the checkpoint has the container of a grant, with a whole share: half of one may be in it by chance."""
        if not self._liveness.is_written_since(grant, listing):
            return False
        units = grant.device_ids
        names = {(part.pod_uid, part.container) for part in listing.parts if not units.isdisjoint(part.devices)}
        entered = [part for part in listing.parts if (part.pod_uid, part.container) in names]
        return bool(entered) and not any(
            0 < each.cores < CORES and not each.memory
            for each in amounts_of(unit for part in entered for unit in part.devices).values()
        )

    def asking(self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None) -> Asking:
        """
        For whom the kubelet may ask for these units: a pod of which the checkpoint has some of them, one for which just
        these are reserved, and the pod of the newest grant, if this lacks them.
        """
        kind = kind_of(units)
        half = self.open_half(kind, poll) if kind is not None else None
        return self._asking(resource, units, poll, half)

    def _asking(
        self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None, half: OpenHalf | None
    ) -> Asking:
        """The same, where `half` is the other half of them that is open."""
        asked, parts = frozenset(units), poll.listing.parts if poll is not None else ()
        pods = {part.pod_uid for part in parts if part.resource == resource and not asked.isdisjoint(part.devices)}
        records = set[AllocationID]()
        state = self._state()
        for reservation, container in reservations_of(self._reserved(), self._clock.monotonic(), resource, asked):
            pods |= {reservation.pod_uid, f"{reservation.namespace}/{reservation.pod}"}
            records |= {
                each.id
                for each in state.allocations.values()
                if each.owner is None and each.amounts and is_all_of(container.devices, each)
            }
        if half is not None and self._newest is not None and (not pods or not pods.isdisjoint(self._newest.pods)):
            pods |= self._newest.pods
            if self._newest.pods:
                records.add(half.allocation.id)
                pods |= {holder_of(owner, "").pod for owner in (half.allocation.owner,) if owner is not None}
        return Asking(frozenset(pods) - {""}, frozenset(records))

    def prefer(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...]:
        """
        The units that a container should get; () where no GPU has enough of them. `live`: the state without what has ended;
        `displaced`: what counts as held besides; `poll`: what the kubelet says, if it does. What is reserved is spared,
        of both kinds, while there is enough beside it; and of a GPU where there is not, the units that are not reserved.
        """
        resource, available, must_include, size = question
        kind = unit_of(live.hardware, resource)
        if kind is None or not max(1, len(must_include)) <= size <= len(available):
            return ()
        devices = live.hardware.devices[resource]
        offered, required = devices.some(available), devices.some(must_include)
        if len(required) < len(must_include) or (required - offered).bits:
            return ()
        reserved, now, half = self._reserved(), self._clock.monotonic(), self.open_half(kind, poll)
        own = reserved_units(live, reserved, now, question, half)
        if own is not None and not own.is_swapped:
            return own.units
        if own is None and spread_for(reserved, now, resource, size) is not None:
            return ()  # Allocate refuses all others
        offered -= required | overlapping(live.ownership, devices, displaced)
        states = (with_reserved_shares(live, reserved, now), live) if reserved.reservations else (live,)
        kept = held_among(states[0].ownership, resource, devices) if len(states) > 1 else devices.nothing
        for share, state in product(shares_asked(kind, question, reserved, now), states):
            spare = offered - held_among(state.ownership, resource, devices)
            fitting = {gpu: count for gpu, units in devices.by_base.items() if (count := len(units & spare))}
            first = half if half is not None else self._recent_half(kind)
            gpus = followed(first, share, kind, must_include, fitting, is_reserved=own is not None)
            if not gpus and own is None:
                was_split = kind == "cores" and size == self._split
                gpus = gpus_for(state, share, kind, must_include, fitting, self._compat, was_split=was_split)
            if gpus:
                beside = units_on(spare - kept, must_include, size, gpus)
                return beside if len(beside) == size or not kept else units_on(spare, must_include, size, gpus)
        return own.units if own is not None else ()

    def check(self, resource: ResourceName, containers: AskedDevices) -> None:
        """Raises InvalidShare and ShareSplit for units that no container can have together. Other devices are all right."""
        for units in containers:
            amounts = amounts_of(units)
            if not amounts:
                continue
            cores = sum(each.cores for each in amounts.values())
            check_share(Share(cores, len(units)), UnitFields(cores=FIELD, memory=FIELD))
            reserved = reservations_of(self._reserved(), self._clock.monotonic(), resource, units)
            if not any(is_spread(units) or (not cores and has_whole(container)) for _, container in reserved):
                check_gpus(amounts, FIELD)

    def check_half(self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None) -> None:
        """
        As `check_spread`. Raises ShareSplit also for memory of another GPU than the computing time that was given just
        before, if nobody has a reservation for it. Once: should the pod of that have been refused meanwhile, this was not
        its other half.
        """
        self.check_spread(resource, units)
        if kind_of(units) != "memory":
            return
        half = self.open_half("memory", poll)
        if half is None or not half.is_certain or are_together(units, half.allocation):
            return
        if any(reservations_of(self._reserved(), self._clock.monotonic(), resource, units)):
            return
        self._newest = None
        self._split = sum(each.cores for each in half.allocation.amounts.values())
        gpus = " and ".join(sorted(half.allocation.amounts))
        raise ShareSplit(
            FIELD, f"the container has computing time of {gpus}, and not enough memory is left there for it"
        )

    def check_spread(self, resource: ResourceName, units: Collection[DeviceID]) -> None:
        """
        Raises ShareSplit for units, not given by now, while a container waits for as many that are spread over several GPUs:
        what it has besides is not known here, and a share of other GPUs, or of one, is not what it asked for.
        """
        own = spread_for(self._reserved(), self._clock.monotonic(), resource, len(units), units)
        if own is None:
            return
        gpus, theirs = (quoted(sorted(amounts_of(ids))) for ids in (units, own))
        raise ShareSplit(
            FIELD,
            f"{len(units)} units of {gpus}, and a container that waits for as many is to have equal parts of {theirs}",
            "delete the pod and let the scheduler choose again; the kubelet has aligned it to other NUMA nodes",
        )


def kind_of(devices: Collection[DeviceID]) -> UnitKind | None:
    """What the first of these that is a unit of a GPU is a unit of, by its id; None: none is."""
    return next((kind for device in devices if (kind := unit_kind(device)) is not None), None)


def has_kind(grant: Allocation, kind: UnitKind) -> bool:
    """Whether a grant has units of this kind."""
    return any(each.cores if kind == "cores" else each.memory for each in grant.amounts.values())
