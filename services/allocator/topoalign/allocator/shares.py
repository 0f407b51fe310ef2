"""
Shares of GPUs that are offered in units, over the kubelet's protocol.

A kubelet asks for a container's computing time and for its memory one after the other, in any order, and does not say for
which container. Both have to be of one GPU, and of a GPU of which one container has all computing time nobody else has
anything.

- GetPreferredAllocation: what is reserved for such a question, if the other half is on its GPU; else units of the GPU of the
  newest grant, if that may lack its other half; else of the GPU that `core.sharing.units` chooses. A whole GPU is followed
  by nothing, and follows nothing, but by a reservation.
- Allocate: units of several GPUs are refused, but for whole GPUs and memory that is reserved with them. So is the memory of
  a share whose computing time was given just before, of another GPU.
- Allocate, by the record (`grants`): a whole GPU is refused while anybody has units of it, and units while somebody has it
  whole. Records that have ended make way; those that are reserved for one pod do not count against each other.
- PreStartContainer (`share_starts`): the kubelet's checkpoint has by then what each container was given.

Which grant may lack its other half is not in the record: an agent that has just started knows none.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.allocator.ports import Listing, Poll
from topoalign.allocator.reconciliation.liveness import Liveness
from topoalign.core.demand.units import Share, UnitFields, check_share, unit_of
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.holdings import UnitKind, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.sparing import held_among, overlapping
from topoalign.core.ports import Clock
from topoalign.core.sharing.refusals import ShareSplit
from topoalign.core.sharing.reserved_units import (
    OpenHalf,
    ShareQuestion,
    given_half,
    has_others,
    has_whole,
    is_all_of,
    needs_memory,
    reservations_of,
    reserved_units,
    with_reserved_shares,
)
from topoalign.core.sharing.units import check_gpus, choose_gpus, units_on, with_missing
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.unit_amounts import UnitsLeft

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

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """Notes what a call for this resource was given. `poll`: what the kubelet answered before, if it was asked."""
        for answer in answers:
            units = answer.from_kubelet.get(resource, ())
            kind = next((kind for unit in units if (kind := unit_kind(unit)) is not None), None)
            if kind is None:
                return
            before, pods = self.open_half(kind, poll), self.asking(resource, units, poll).pods
            is_second = before is not None and before.allocation.amounts.keys() == answer.amounts.keys()
            self._newest = Newest(answer.id, self._clock.monotonic(), is_second, pods)

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
            lacking = [each for each in own if any(is_of_kind(ids, kind) for ids in each[1].devices.values())]
            if own and all(given_half(state, of.pod_uid, container, resource) for of, container in lacking):
                return None
        return OpenHalf(newest, not self._newest.is_second and needs_memory(newest))

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
        kind = next((kind for unit in asked if (kind := unit_kind(unit)) is not None), None)
        half = self.open_half(kind, poll) if kind is not None else None
        if half is not None and self._newest is not None and (not pods or not pods.isdisjoint(self._newest.pods)):
            pods |= self._newest.pods
            records |= {half.allocation.id} if self._newest.pods else set()
        return Asking(frozenset(pods) - {""}, frozenset(records))

    def prefer(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...]:
        """
        The units that a container should get; () where no GPU has enough of them. `live`: the state without what has ended;
        `displaced`: what counts as held besides; `poll`: what the kubelet says, if it does. What is reserved is spared,
        of both kinds, while there is enough beside it.
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
        offered -= required | overlapping(live.ownership, devices, displaced)
        for state in (with_reserved_shares(live, reserved, now), live) if reserved.reservations else (live,):
            spare = offered - held_among(state.ownership, resource, devices)
            fitting = {gpu: count for gpu, units in devices.by_base.items() if (count := len(units & spare))}
            share = share_asked(kind, size)
            gpus = followed(half, share, must_include, fitting, is_reserved=own is not None)
            if not gpus and own is None:
                gpus = gpus_for(state, share, must_include, fitting, self._compat)
            if gpus:
                return units_on(spare, must_include, size, gpus)
        return own.units if own is not None else ()

    def check(self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]) -> None:
        """Raises InvalidShare and ShareSplit for units that no container can have together. Other devices are all right."""
        for units in containers:
            amounts = amounts_of(units)
            if not amounts:
                continue
            cores = sum(each.cores for each in amounts.values())
            check_share(Share(cores, len(units)), UnitFields(cores=FIELD, memory=FIELD))
            reserved = reservations_of(self._reserved(), self._clock.monotonic(), resource, units)
            if not (len(amounts) > 1 and not cores and any(has_whole(container) for _, container in reserved)):
                check_gpus(amounts, FIELD)

    def check_half(self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None) -> None:
        """
        Raises ShareSplit for memory of another GPU than the computing time that was given just before, if nobody has a
        reservation for it. Once: should the pod of that have been refused meanwhile, this was not its other half.
        """
        if not is_of_kind(units, "memory"):
            return
        half = self.open_half("memory", poll)
        if half is None or not half.is_certain or amounts_of(units).keys() <= half.allocation.amounts.keys():
            return
        if any(reservations_of(self._reserved(), self._clock.monotonic(), resource, units)):
            return
        self._newest = None
        (gpu,) = half.allocation.amounts
        raise ShareSplit(
            FIELD, f"the container has computing time of {gpu}, and that has not enough memory left for it"
        )


def is_of_units(devices: Collection[DeviceID]) -> bool:
    """Whether these are units of GPUs, by their ids."""
    return any(unit_kind(device) is not None for device in devices)


def is_of_kind(devices: Collection[DeviceID], kind: UnitKind) -> bool:
    """Whether these are units of this kind, by their ids."""
    return any(unit_kind(device) == kind for device in devices)


def has_kind(grant: Allocation, kind: UnitKind) -> bool:
    """Whether a grant has units of this kind."""
    return any(each.cores if kind == "cores" else each.memory for each in grant.amounts.values())


def share_asked(kind: UnitKind, size: int) -> Share:
    """What is asked for where the kubelet asks for so many units: a share of computing time comes with some memory."""
    return Share(size, 0 if size >= CORES else 1) if kind == "cores" else Share(0, size)


def followed(
    half: OpenHalf | None,
    share: Share,
    must_include: Sequence[DeviceID],
    fitting: Mapping[DeviceID, int],
    *,
    is_reserved: bool,
) -> tuple[DeviceID, ...]:
    """
    The GPU of the newest grant, where units of it should be the other half; () else. Of whole GPUs they should be only
    where a reservation says that memory comes with them (`is_reserved`). `fitting`: GPU -> units that can be had.
    """
    if half is None or share.whole or must_include:
        return ()
    amounts = half.allocation.amounts
    size = share.cores or share.blocks
    fits = len(amounts) == 1 and all(fitting.get(gpu, 0) >= size for gpu in amounts)
    return tuple(amounts) if fits and (is_reserved or all(each.cores < CORES for each in amounts.values())) else ()


def gpus_for(
    state: NodeState, share: Share, must_include: Sequence[DeviceID], fitting: Mapping[DeviceID, int], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs of the units that a container should get: those of what it takes over from an init container, if they have
    enough, and of whole GPUs others beside them; () where none have enough. `compat`: as in the rules of the node.
    """
    left = {gpu: counted(units, share, fitting.get(gpu, 0)) for gpu, units in state.ownership.units_left.items()}
    taken = Counter(map(state.hardware.card_of, must_include))
    if not taken:
        return choose_gpus(state.hardware, left, share, fitting, compat)
    gpus = with_missing(state.hardware, left, share, tuple(taken), fitting, compat)
    size = share.cores or share.blocks
    return gpus if sum(taken[gpu] + fitting.get(gpu, 0) for gpu in gpus) >= size else ()


def counted(left: UnitsLeft, share: Share, spare: int) -> UnitsLeft:
    """What is left of a GPU, as far as the kubelet may take it."""
    if share.cores:
        unused = left.unused and spare >= CORES
        return msgspec.structs.replace(left, cores=min(left.cores, spare), unused=unused)
    return msgspec.structs.replace(left, blocks=min(left.blocks, spare))
