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

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import product
from typing import NamedTuple

import msgspec

from topoalign.allocator.ports import AskedDevices, Listing, Poll
from topoalign.allocator.reconciliation.liveness import Liveness, places, still_displaced
from topoalign.core.demand.shares import Left, Share, UnitFields, check_share, fits_left_units, gpus_with_room, unit_of
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import UnitKind, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.placement.reserved_choice import open_reservations
from topoalign.core.placement.sparing import held_among, overlapping_devices
from topoalign.core.ports import Clock
from topoalign.core.sharing.choosers import check_gpus, choose_gpus_for_units, units_on, with_missing
from topoalign.core.sharing.reserved_shares import (
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
from topoalign.core.sharing.share_refusals import ShareSplit, WholeGpuInUse
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.share_amounts import (
    Holder,
    UnitsLeft,
    container_holder,
    exclusive_conflicts,
    preventing_allocations,
)

# Which GPUs a kubelet is told to take units of where nothing is reserved for its question.
#
# It asks for a number of units of one kind, and does not say what the container asks for besides. That is known where a
# container waits for as many, which the kubelet aligns elsewhere than was predicted. What it takes is of one GPU, or of
# whole ones: units that are spread over several GPUs are given by a reservation alone.
#
# Where the other half is not known, it is taken to be an equal part of the GPU: 50 units of computing time of a GPU
# with 60 blocks come with 30. Of the GPUs in use that have both left, the first half goes to one of which most of the
# other kind is left, so that there is room for more than the equal part; where no GPU in use has, to any that has most
# left. Example:
#
#     left of GPU-0: 60 and 30 blocks, of GPU-1: 100 and 60, unused, of GPU-2: 80 and 50
#     asked for 50 of computing time: GPU-2, where up to 50 blocks fit then; for 50 blocks: GPU-1, as GPU-2 has less than 84
#
# A pod that was refused because its memory was more than that is created again, and would be refused each time. So a
# share of as much computing time as the last one that was refused so goes to any GPU of which most memory is left.


def share_asked(kind: UnitKind, size: int) -> Share:
    """What is asked for where the kubelet asks for so many units: a share of computing time comes with some memory."""
    return Share(size, 0 if size >= CORES else 1) if kind == "cores" else Share(0, size)


def shares_asked(kind: UnitKind, question: ShareQuestion, reserved: NodeReservations, now: float) -> tuple[Share, ...]:
    """
    What may be asked for where the kubelet asks so: first the share of a container that waits, at monotonic second `now`,
    for as many units, of which one GPU has to have both halves left.
    """
    for _, container, units in open_reservations(reserved, now, question.resource):
        if len(units) == question.size:
            held = [unit for ids in container.devices.values() for unit in ids]
            cores, blocks = (sum(unit_kind(unit) == each for unit in held) for each in ("cores", "memory"))
            if 0 < cores < CORES and blocks:
                return Share(cores, blocks), share_asked(kind, question.size)
    return (share_asked(kind, question.size),)


def size_of(share: Share, kind: UnitKind) -> int:
    """How many units of this kind it is."""
    return share.cores if kind == "cores" else share.blocks


def followed(
    half: OpenHalf | None,
    share: Share,
    kind: UnitKind,
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
    fits = len(amounts) == 1 and all(fitting.get(gpu, 0) >= size_of(share, kind) for gpu in amounts)
    return tuple(amounts) if fits and (is_reserved or all(each.cores < CORES for each in amounts.values())) else ()


def gpus_for(
    state: NodeState,
    share: Share,
    kind: UnitKind,
    must_include: Sequence[DeviceID],
    fitting: Mapping[DeviceID, int],
    compat: str,
    *,
    was_split: bool,
) -> tuple[DeviceID, ...]:
    """
    The GPUs of the units of this kind that a container should get: those of what it takes over from an init container, if
    they have enough, and of whole GPUs others beside them; () where none have enough. `compat`: as in the rules of the node.
    `was_split`: whether an equal part of the other half was too little for such a share before.
    """
    left = {gpu: counted(units, kind, fitting.get(gpu, 0)) for gpu, units in state.ownership.units_left.items()}
    taken = Counter(map(state.hardware.card_of, must_include))
    if not taken:
        is_known = share != share_asked(kind, size_of(share, kind))
        among = fitting if is_known or share.whole else with_other_half(left, share, kind, was_split=was_split)
        return choose_gpus_for_units(state.hardware, left, share, among, compat)
    gpus = with_missing(state.hardware, left, share, tuple(taken), fitting, compat)
    return gpus if sum(taken[gpu] + fitting.get(gpu, 0) for gpu in gpus) >= size_of(share, kind) else ()


def with_other_half(left: Left, share: Share, kind: UnitKind, *, was_split: bool) -> list[DeviceID]:
    """
    The GPUs with room for these units that have most left of the other kind: of those in use with an equal part of both
    left, else of all. `was_split` as for `gpus_for`.
    """
    room = gpus_with_room(left, share)
    in_use = [
        gpu for gpu in room if not left[gpu].unused and fits_left_units(left[gpu], with_equal_part(share, left[gpu]))
    ]
    among = room if was_split else in_use or room
    others = {gpu: left[gpu].blocks if kind == "cores" else left[gpu].cores for gpu in among}
    return [gpu for gpu, other in others.items() if other == max(others.values())]


def with_equal_part(share: Share, left: UnitsLeft) -> Share:
    """The share of a GPU of which one half is asked for, if the other half is as large a part of it; rounded up."""
    return share._replace(
        cores=share.cores or -(-share.blocks * CORES // left.all_blocks),
        blocks=-(-share.cores * left.all_blocks // CORES) if share.cores else share.blocks,
    )


def counted(left: UnitsLeft, kind: UnitKind, spare: int) -> UnitsLeft:
    """What is left of a GPU, as far as the kubelet may take units of this kind."""
    if kind == "cores":
        unused = left.unused and spare >= CORES
        return msgspec.structs.replace(left, cores=min(left.cores, spare), unused=unused)
    return msgspec.structs.replace(left, blocks=min(left.blocks, spare))


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
        self._state = state
        self._clock = clock
        self._reserved = reserved
        self._liveness = liveness
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
        reserved = self._reserved()
        now = self._clock.monotonic()
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
        asked = frozenset(units)
        parts = poll.listing.parts if poll is not None else ()
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
                pods |= {container_holder(owner, "").pod for owner in (half.allocation.owner,) if owner is not None}
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
        offered = devices.some(available)
        required = devices.some(must_include)
        if len(required) < len(must_include) or (required - offered).bits:
            return ()
        reserved = self._reserved()
        now = self._clock.monotonic()
        half = self.open_half(kind, poll)
        own = reserved_units(live, reserved, now, question, half)
        if own is not None and not own.is_swapped:
            return own.units
        if own is None and spread_for(reserved, now, resource, size) is not None:
            return ()  # Allocate refuses all others
        offered -= required | overlapping_devices(live.ownership, devices, displaced)
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


# Whether units of a GPU can be given beside what others have of it: of a GPU of which one container has all computing
# time nobody else has anything.
#
# The record knows what was given; whose it is, it learns from PodResources when the pod runs, and of init containers
# never. The checkpoint has that as soon as a container has all that it asks for. So a container is judged by all that
# either says it has: its computing time may be in several records, where later containers of its pod or of others have
# taken some over.
#
# For which pod the kubelet asks, it does not say. It is likely one whose units it gives again, for only containers of
# one pod take over from one another; one for which just these units are reserved; or the one of the newest grant, if
# that lacks these. What such a pod has does not count; should it be another one, its container does not start
# (`share_starts`).


class ShareExclusion:
    """Judges at Allocate who keeps units of GPUs from being given."""

    def __init__(self, state: Callable[[], NodeState], liveness: Liveness, shares: Shares) -> None:
        """`state`: of the node now; while calls are judged, with what those before were given."""
        self._state = state
        self._liveness = liveness
        self._shares = shares

    def beside(self, resource: ResourceName, units: Collection[DeviceID]) -> list[Allocation]:
        """
        The records of these GPUs, where somebody may have one of them whole, or would: the kubelet has to tell then whose
        they are.
        """
        state = self._state()
        asked = amounts_of(units) if unit_of(state.hardware, resource) is not None else {}
        if not asked:
            return []
        near = [each for each in state.allocations.values() if not asked.keys().isdisjoint(each.amounts)]
        for gpu, amount in asked.items():
            held = [each.amounts[gpu].cores for each in near if gpu in each.amounts]
            if held and (amount.cores >= CORES or sum(held) >= CORES):
                return near
        return []

    def making_room(
        self,
        resource: ResourceName,
        units: Collection[DeviceID],
        beside: Sequence[Allocation],
        way: Mapping[AllocationID, Allocation],
        poll: Poll | None,
    ) -> dict[AllocationID, Allocation]:
        """
        Those of the records `beside` that make way, by id: the units could not be given beside them, and their containers
        have ended, also because one of them is among those of which the kubelet gives away devices (`way`). Raises
        WholeGpuInUse where somebody else has one of the GPUs whole, or has something of one that is asked for whole.
        """
        if not beside:
            return {}
        assert poll is not None, "a record is known to the poll"
        listing = poll.listing
        liveness = self._liveness
        asked = amounts_of(units)
        over = {(each.owner, each.pod_uid) for each in way.values() if each.owner}
        counted = list[Allocation]()
        ended = list[Allocation]()
        for record in beside:
            runs_on = liveness.is_displaced(record, listing)
            gone = [record] if liveness.has_ended(record, listing, poll.at) else []
            if record.id in way:
                counted += [record] if runs_on else []
                continue
            is_over = (record.owner, record.pod_uid) in over and not runs_on
            is_dropped = liveness.dropped(gone, (), (), poll.at) or (gone and self._is_nobodys(record, listing))
            (ended if is_over or is_dropped else counted).append(record)
        owners = self._shares.asking(resource, units, poll)
        for holder, held in units_held(counted, beside, listing, liveness).items():
            gpus = exclusive_conflicts(asked, amounts_of(held))
            if gpus and holder.pod not in owners.pods and holder.container not in owners.records:
                raise WholeGpuInUse(gpus, " ".join(filter(None, holder)))
        return {each.id: each for each in preventing_allocations(ended, asked)}

    def _is_nobodys(self, record: Allocation, listing: Listing) -> bool:
        """
        Whether a checkpoint that was written since a grant has nothing of it: a kubelet writes down what a container has
        before it asks for the next one. It writes at other moments as well, maybe just before it notes a grant; that one may
        be the first half of the container for which it asks now, and is the newest then: a container has units of two kinds,
        and is asked for each once.
        """
        return (
            record.id != self._shares.newest
            and listing.checkpoint is not None
            and listing.checkpoint.isdisjoint(places(record))
            and self._liveness.is_written_since(record, listing)
        )


def units_held(
    records: Iterable[Allocation], every: Iterable[Allocation], listing: Listing, liveness: Liveness
) -> Mapping[Holder, Set[DeviceID]]:
    """
    Container -> what it has by these records. What no owner is known of has that of the checkpoint's entry, unless this is
    older: the kubelet writes what it drops later than it gives it anew. `every`: these and those of containers that have
    ended; what such a one displaced may run on.
    """
    found = defaultdict[Holder, set[DeviceID]](set)
    told = [each for each in records if each.owner is not None or liveness.is_written_since(each, listing)]
    units = frozenset[DeviceID]().union(*(each.device_ids for each in told))
    for part in listing.parts:
        if some := units.intersection(part.devices):
            found[Holder(part.pod_uid, part.container)] |= some
    entered = frozenset[DeviceID]().union(*found.values())
    names = {each.id for each in told}
    for each in records:
        if each.owner is not None:
            found[container_holder(each.owner, each.pod_uid)] |= each.device_ids
        elif each.id not in names or entered.isdisjoint(each.device_ids):
            found[Holder("", each.id)] |= each.device_ids
    for each in every:
        for former in still_displaced(each.displaced, listing):
            found[container_holder(former.owner, former.pod_uid)].update(*former.devices.values())
    return found
