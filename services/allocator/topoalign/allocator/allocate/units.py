"""
Prefers and checks vcuda units in the kubelet's calls.

The kubelet allocates a container's computing time and its memory one after the other, in any order. It does not
identify the container. Both halves must be on the same GPU. If a container has all computing time of a GPU, no other
container can use the GPU.

- GetPreferredAllocation prefers, in this order: units that are reserved for a request of this size, if the container's
  other half is on the same GPU; units of the newest grant's GPU, if the other half of that grant may be missing; units
  of the GPU that `_gpus_for` chooses.
- Allocate refuses: units of several GPUs, unless they are reserved or whole GPUs; memory on another GPU than the
  computing time that was granted just before; a whole GPU while another container has units of it; units while another
  container has the whole GPU.
- PreStartContainer (`pre_start`) checks again. At that time, the checkpoint has the devices of each container.

The ledger does not store which grant may still lack its other half. So an agent that has just started does not know it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import product
from typing import NamedTuple

import msgspec

from topoalign.allocator.allocate.claims import AskedContainer, Claim, NodeView
from topoalign.allocator.ports import KubeletListing, Poll
from topoalign.allocator.reconciliation.liveness import LivenessCheck, still_displaced
from topoalign.core.demand.shares import (
    Share,
    ShareFields,
    check_units_asked,
    enough,
    gpus_with_enough,
    share_of_units,
    unit_amount,
    unit_of,
)
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import Amount, UnitKind, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.placement.reserved_choice import open_reservations
from topoalign.core.placement.sparing import held_among, overlapping_devices
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
    ShareLeft,
    container_holder,
    exclusive_conflicts,
    preventing_allocations,
    sum_amounts,
)

# Preferences without a matching reservation.
#
# The kubelet requests a number of units of one kind. The request does not have the container's other amount. That
# amount is known only if a container with a reservation waits for this number of units and the kubelet aligns it to
# other NUMA nodes than predicted. The preferred units are of one GPU, or they are whole GPUs. Units that are spread
# over several GPUs need a reservation.
#
# If the other half is unknown, it is assumed to be the same part of the GPU. For example, 50 units of computing time of
# a GPU with 60 memory blocks need 30 blocks. Of the GPUs in use that have enough of both free, the first half goes to
# the GPU with the most units of the other kind free, so that a larger other half also fits. If no GPU in use has
# enough, it goes to any GPU with the most units of the other kind free. Example:
#
#     free: GPU-0 (in use) 60 cores and 30 blocks; GPU-1 (unused) 100 and 60; GPU-2 (in use) 80 and 50
#     50 cores: GPU-2, because up to 50 blocks then fit; 50 blocks: GPU-1, because their equal part is 84 cores
#
# If a pod is refused because it requests more memory than the equal part, it is created again and would be refused each
# time. So a share with the same computing time as the last share that was refused for this reason goes to the GPU with
# the most free memory, whether the GPU is in use or not.


def share_asked(kind: UnitKind, size: int) -> Share:
    """Returns the smallest share with this many units. A share with computing time has at least one memory block."""
    least = Amount(cores=0, memory=MEMORY_BLOCK if kind == "cores" and size < CORES else 0)
    return share_of_units(sum_amounts((unit_amount(kind, size), least)))


def shares_asked(kind: UnitKind, question: ShareQuestion, reserved: NodeReservations, now: float) -> tuple[Share, ...]:
    """Returns the possible shares of a request. The share of a container with a reservation of this size is first."""
    for _, container, units in open_reservations(reserved, now, question.resource):
        if len(units) == question.size:
            held = [unit for ids in container.devices.values() for unit in ids]
            cores, blocks = (sum(unit_kind(unit) == each for unit in held) for each in ("cores", "memory"))
            if 0 < cores < CORES and blocks:
                return Share(1, cores, blocks * MEMORY_BLOCK), share_asked(kind, question.size)
    return (share_asked(kind, question.size),)


def count_units(share: Share, kind: UnitKind) -> int:
    """Returns the number of units of this kind."""
    return share.gpus * (share.cores if kind == "cores" else share.memory // MEMORY_BLOCK)


def gpu_of_other_half(
    half: OpenHalf | None,
    share: Share,
    kind: UnitKind,
    must_include: Sequence[DeviceID],
    fitting: Mapping[DeviceID, int],
    *,
    is_reserved: bool,
) -> tuple[DeviceID, ...]:
    """
    Returns the GPU of the newest grant if the requested units should be its other half; () otherwise. `is_reserved`:
    the request has a reservation, so the grant can be a whole GPU. `fitting`: GPU -> number of available units.
    """
    if half is None or share.whole or must_include:
        return ()
    amounts = half.allocation.amounts
    fits = len(amounts) == 1 and all(fitting.get(gpu, 0) >= count_units(share, kind) for gpu in amounts)
    return tuple(amounts) if fits and (is_reserved or all(each.cores < CORES for each in amounts.values())) else ()


def with_equal_part(share: Share, offered: Amount) -> Share:
    """Completes one half of a share. The other half is the same part of the GPU, rounded up."""
    blocks = -(-share.cores * (offered.memory // MEMORY_BLOCK) // CORES)
    return share._replace(
        cores=share.cores or -(-share.memory * CORES // offered.memory),
        memory=blocks * MEMORY_BLOCK if share.cores else share.memory,
    )


def limit_units_left(left: ShareLeft, kind: UnitKind, spare: int) -> ShareLeft:
    """Limits the free units of this kind to the number that the kubelet offers. The other units count as held."""
    offered = unit_amount(kind, spare)
    cores = max(left.held.cores, left.offered.cores - offered.cores) if kind == "cores" else left.held.cores
    memory = max(left.held.memory, left.offered.memory - offered.memory) if kind == "memory" else left.held.memory
    return msgspec.structs.replace(left, held=Amount(cores=cores, memory=memory))


OPEN_SECONDS = 5.0
"""Maximum time from a grant to the grant of the other half. The kubelet needs milliseconds."""
FIELD = "devices_ids"


class NewestUnitGrant(NamedTuple):
    """The newest grant of units."""

    id: AllocationID
    at: float
    """Monotonic seconds."""
    is_second: bool
    """Whether it may be the second half of a share, because the previous grant was on the same GPUs."""
    pods: frozenset[str]
    """The pods that it may be for, as in `PossibleOwners.pods`."""


class PossibleOwners(NamedTuple):
    """The containers that a call of the kubelet may be for."""

    pods: frozenset[str]
    """UIDs of pods. For pods with a reservation, also their names as in `share_amounts.Holder`."""
    records: frozenset[AllocationID]
    """Allocations that may be of the same container."""


class UnitClaim(Claim):
    """Claims a share in vcuda units. Prefers and checks units by the newest grant of units and the reservations."""

    def __init__(self, view: NodeView) -> None:
        super().__init__(view)
        self._newest: NewestUnitGrant | None = None
        """The newest grant of units."""
        self._split = 0
        """The computing time, in units, of the last share whose memory was refused."""

    def applies(self, resource: ResourceName) -> bool:
        """Whether the resource is offered in units."""
        return unit_of(self.view.state.hardware, resource) is not None

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """As `Claim.granted`."""
        for answer in answers:
            units = answer.from_kubelet.get(resource, ())
            if (kind := first_unit_kind(units)) is None:
                return
            before = self.open_half(kind, poll)
            pods = self.possible_owners(resource, units, poll, before).pods
            is_second = before is not None and before.allocation.amounts.keys() == answer.amounts.keys()
            self._newest = NewestUnitGrant(answer.id, self.view.now, is_second, pods)

    def open_half(self, kind: UnitKind, poll: Poll | None) -> OpenHalf | None:
        """
        Returns the newest grant if units of this kind may be its other half. Returns None if its container has
        everything reserved for it, or is in the checkpoint. The kubelet writes it when a container has all its devices.
        """
        if self._newest is None or self.view.now - self._newest.at > OPEN_SECONDS:
            return None
        state = self.view.state
        newest = state.allocations.get(self._newest.id)
        if newest is None or newest.pod_uid or has_kind(newest, kind):
            return None
        if poll is not None and self._is_entered(newest, poll.listing):
            return None
        reserved = self.view.reserved
        now = self.view.now
        for resource, units in newest.from_kubelet.items():
            own = [
                (of, container)
                for of, container in reservations_of(reserved, now, resource, units)
                if not has_others(state, of.pod_uid, container, resource, units)
            ]
            lacking = [each for each in own if any(first_unit_kind(ids) == kind for ids in each[1].devices.values())]
            if own and all(given_half(state, of.pod_uid, container, resource) for of, container in lacking):
                return None
        return OpenHalf(newest, not self._newest.is_second and needs_memory(newest))

    def _is_entered(self, grant: Allocation, listing: KubeletListing) -> bool:
        """
        Whether the checkpoint has the container of a grant with a complete share. Computing time of a shared GPU
        without memory is not complete.
        """
        if not self.view.liveness.is_written_since(grant, listing):
            return False
        units = grant.device_ids
        names = {(part.pod_uid, part.container) for part in listing.parts if not units.isdisjoint(part.devices)}
        entered = [part for part in listing.parts if (part.pod_uid, part.container) in names]
        return bool(entered) and not any(
            0 < each.cores < CORES and not each.memory
            for each in amounts_of(unit for part in entered for unit in part.devices).values()
        )

    def possible_owners(
        self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None, half: OpenHalf | None
    ) -> PossibleOwners:
        """
        Returns the containers that a call for these units may be for. These are the containers of pods that have some
        of these units in the checkpoint, and of pods for which exactly these units are reserved. If the units may be
        the other `half` of the newest grant, its container is included.
        """
        asked = frozenset(units)
        parts = poll.listing.parts if poll is not None else ()
        pods = {part.pod_uid for part in parts if part.resource == resource and not asked.isdisjoint(part.devices)}
        records = set[AllocationID]()
        state = self.view.state
        for reservation, container in reservations_of(self.view.reserved, self.view.now, resource, asked):
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
                if half.allocation.owner is not None:
                    pods.add(container_holder(half.allocation.owner, "").pod)
        return PossibleOwners(frozenset(pods) - {""}, frozenset(records))

    def prefer(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...]:
        """
        Returns the preferred units; () if no GPU has enough. `live`: the state without ended allocations. `displaced`
        devices count as held. Units that are reserved for other requests are avoided if possible.
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
        reserved = self.view.reserved
        now = self.view.now
        half = self.open_half(kind, poll)
        own = reserved_units(live, reserved, now, question, half)
        if own is not None and not own.is_swapped:
            return own.units
        if own is None and spread_for(reserved, now, resource, size) is not None:
            return ()  # Allocate refuses all other units
        offered -= required | overlapping_devices(live.ownership, devices, displaced)
        states = (with_reserved_shares(live, reserved, now), live) if reserved.reservations else (live,)
        kept = held_among(states[0].ownership, resource, devices) if len(states) > 1 else devices.nothing
        for share, state in product(shares_asked(kind, question, reserved, now), states):
            spare = offered - held_among(state.ownership, resource, devices)
            fitting = {gpu: count for gpu, units in devices.by_base.items() if (count := len(units & spare))}
            gpus = gpu_of_other_half(half, share, kind, must_include, fitting, is_reserved=own is not None)
            if not gpus and own is None:
                gpus = self._gpus_for(state, share, kind, question, fitting)
            if gpus:
                unreserved = units_on(spare - kept, must_include, size, gpus)
                return unreserved if len(unreserved) == size or not kept else units_on(spare, must_include, size, gpus)
        return own.units if own is not None else ()

    def _gpus_for(
        self, state: NodeState, share: Share, kind: UnitKind, question: ShareQuestion, fitting: Mapping[DeviceID, int]
    ) -> tuple[DeviceID, ...]:
        """Returns the preferred units' GPUs; () if none have enough. `fitting`: GPU -> number of available units."""
        hardware = state.hardware
        compat = self.view.compat
        left = {
            gpu: limit_units_left(units, kind, fitting.get(gpu, 0)) for gpu, units in state.ownership.units_left.items()
        }
        taken = Counter(map(hardware.parent_of, question.must_include))
        if taken:  # a container that reuses an init container's units gets units of the same GPUs
            gpus = with_missing(hardware, left, share, tuple(taken), fitting, compat)
            return gpus if sum(taken[gpu] + fitting.get(gpu, 0) for gpu in gpus) >= count_units(share, kind) else ()
        if share != share_asked(kind, count_units(share, kind)) or share.whole:
            return choose_gpus_for_units(hardware, left, share, fitting, compat)
        # The other half is unknown. GPUs in use that have the equal part of both free come first, unless the equal part
        # was too small for the last such share. Of these, the GPUs with the most units of the other kind free are
        # chosen.
        room = gpus_with_enough(hardware, left, share)
        in_use = [
            gpu for gpu in room if not left[gpu].unused and enough(left[gpu], with_equal_part(share, left[gpu].offered))
        ]
        was_split = kind == "cores" and question.size == self._split
        among = room if was_split else in_use or room
        others = {gpu: left[gpu].left.memory if kind == "cores" else left[gpu].left.cores for gpu in among}
        most = [gpu for gpu, other in others.items() if other == max(others.values())]
        return choose_gpus_for_units(hardware, left, share, most, compat)

    def check(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        """Raises InvalidShare or ShareSplit if no container can have these units together."""
        amounts = amounts_of(devices)
        cores = sum(each.cores for each in amounts.values())
        asked = Amount(cores=cores, memory=len(devices) * MEMORY_BLOCK)
        check_units_asked(asked, ShareFields(cores=FIELD, memory=FIELD))
        reserved = reservations_of(self.view.reserved, self.view.now, resource, devices)
        if not any(is_spread(devices) or (not cores and has_whole(container)) for _, container in reserved):
            check_gpus(amounts, FIELD)

    def check_half(self, resource: ResourceName, units: Collection[DeviceID], poll: Poll | None) -> None:
        """
        Checks as `check_spread`. Also raises ShareSplit if the units are memory that is neither reserved nor on the GPU
        of the computing time that was granted just before. Raises this error only once per grant, because the pod of
        the grant may have been refused meanwhile.
        """
        self.check_spread(resource, units)
        if first_unit_kind(units) != "memory":
            return
        half = self.open_half("memory", poll)
        if half is None or not half.is_certain or are_together(units, half.allocation):
            return
        if any(reservations_of(self.view.reserved, self.view.now, resource, units)):
            return
        self._newest = None
        self._split = sum(each.cores for each in half.allocation.amounts.values())
        gpus = " and ".join(sorted(half.allocation.amounts))
        raise ShareSplit(
            FIELD, f"the container has computing time of {gpus}, and not enough memory is left there for it"
        )

    def check_spread(self, resource: ResourceName, units: Collection[DeviceID]) -> None:
        """Raises ShareSplit if a container with other reserved units waits for this many units on several GPUs."""
        own = spread_for(self.view.reserved, self.view.now, resource, len(units), units)
        if own is None:
            return
        gpus, theirs = (quoted(sorted(amounts_of(ids))) for ids in (units, own))
        raise ShareSplit(
            FIELD,
            f"{len(units)} units of {gpus} were requested, but a waiting container needs them in equal parts of {theirs}",
            "delete the pod and let the scheduler choose again; the kubelet has aligned it to other NUMA nodes",
        )

    # If a container has all computing time of a GPU, no other container can use the GPU.
    #
    # The ledger contains grants. It gets their owners from PodResources when the pod runs, but never for init
    # containers. The checkpoint has the owner as soon as a container has all its devices. So the check uses the devices
    # in both. The computing time of one container may be in several allocations, if later containers of its pod or of
    # other pods reuse some of it.
    #
    # The kubelet does not identify the pod of a call. It can be:
    #
    # - a pod that already has some of these units, because only containers of one pod reuse each other's units;
    # - a pod for which exactly these units are reserved;
    # - the pod of the newest grant, if these units may be the other half of that grant.
    #
    # The units of such a pod do not conflict with the call. If the assumption is wrong, the container does not start
    # (`pre_start`).

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """
        Returns all allocations on these GPUs if a container may have one of the GPUs as a whole, or if this call
        requests a whole GPU that is in use.
        """
        state = self.view.state
        amounts = amounts_of(asked.devices)
        sharing = [each for each in state.allocations.values() if not amounts.keys().isdisjoint(each.amounts)]
        for gpu, amount in amounts.items():
            held = [each.amounts[gpu].cores for each in sharing if gpu in each.amounts]
            if held and (amount.cores >= CORES or sum(held) >= CORES):
                return sharing
        return ()

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """
        Releases ended allocations on these GPUs if they prevent the grant. Raises as `check_half`. Raises WholeGpuInUse
        if another container has one of the GPUs as a whole, or has units of a GPU that is requested as a whole.
        """
        resource = asked.resource
        self.check_half(resource, asked.ids, asked.poll)
        if not conflicts:
            return
        poll = asked.known_poll
        listing = poll.listing
        liveness = self.view.liveness
        amounts = amounts_of(asked.ids)
        stale = asked.stale
        over = {(each.owner, each.pod_uid) for each in stale.values() if each.owner}
        counted = list[Allocation]()
        ended = list[Allocation]()
        for record in conflicts:
            runs_on = liveness.is_displaced(record, listing)
            has_ended = liveness.has_ended(record, listing, poll.at)
            if record.id in stale:
                counted += [record] if runs_on else []
                continue
            is_over = (record.owner, record.pod_uid) in over and not runs_on
            is_dropped = liveness.is_dropped(record, poll.at)
            (ended if is_over or (has_ended and is_dropped) else counted).append(record)
        kind = first_unit_kind(asked.ids)
        half = self.open_half(kind, poll) if kind is not None else None
        owners = self.possible_owners(resource, asked.ids, poll, half)
        for holder, held in units_held(counted, conflicts, listing, liveness).items():
            gpus = exclusive_conflicts(amounts, amounts_of(held))
            if gpus and holder.pod not in owners.pods and holder.container not in owners.records:
                raise WholeGpuInUse(gpus, " ".join(filter(None, holder)))
        asked.release(preventing_allocations(ended, amounts))


def first_unit_kind(devices: Collection[DeviceID]) -> UnitKind | None:
    """Returns the kind of the first vcuda unit among these devices, or None if there is none."""
    return next((kind for device in devices if (kind := unit_kind(device)) is not None), None)


def has_kind(grant: Allocation, kind: UnitKind) -> bool:
    """Whether a grant has units of this kind."""
    return any(each.cores if kind == "cores" else each.memory for each in grant.amounts.values())


def units_held(
    records: Iterable[Allocation], every: Iterable[Allocation], listing: KubeletListing, liveness: LivenessCheck
) -> Mapping[Holder, Set[DeviceID]]:
    """
    Returns container -> its units in these allocations. If an allocation has no owner, the owner is taken from the
    checkpoint entry, unless the entry is older. `every`: all allocations, including ended ones, because a container
    that an ended one displaced may still run.
    """
    found = defaultdict[Holder, set[DeviceID]](set)
    entered_later = [each for each in records if each.owner is not None or liveness.is_written_since(each, listing)]
    units = frozenset[DeviceID]().union(*(each.device_ids for each in entered_later))
    for part in listing.parts:
        if some := units.intersection(part.devices):
            found[Holder(part.pod_uid, part.container)] |= some
    entered = frozenset[DeviceID]().union(*found.values())
    names = {each.id for each in entered_later}
    for each in records:
        if each.owner is not None:
            found[container_holder(each.owner, each.pod_uid)] |= each.device_ids
        elif each.id not in names or entered.isdisjoint(each.device_ids):
            found[Holder("", each.id)] |= each.device_ids
    for each in every:
        for former in still_displaced(each.displaced, listing):
            found[container_holder(former.owner, former.pod_uid)].update(former.device_ids)
    return found
