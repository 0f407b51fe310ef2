"""
Whether a container may start with its slots of GPUs.

Slots are of GPUs, and what a container holds of these is what is reserved with them. Allocate does not say for whom, so a
container may be given the slots of another one that waits for as many: one that came past the scheduler, say. When it
starts, its pod is known. One that has other amounts than are reserved for it, or has what is reserved for a container of
another pod, does not start. Example with ten slots, 100 cores and 40960 MiB each:

    reserved for a: GPU-0::3 with 60 cores and 6000 MiB; b has no reservation, and the kubelet asks for it first
    b is given GPU-0::3, and a then another slot with an equal part, 10 cores and 4096 MiB: neither starts

What a container has is judged as soon as the kubelet shows it. A reservation may end before that, as while PodResources is
away, and the agent may start anew before the container starts: so the record keeps for which pods as much was reserved
(`Allocation.reserved_for`). A later container of a pod may take slots over from an init container that has more.

PodResources does not show init containers, so of slots that none but these have the checkpoint alone tells whose they are.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import msgspec

from topoalign.allocator.allocate.slots import SlotGrants
from topoalign.allocator.allocate.units import units_held
from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.ports import Listing, Part, Poll
from topoalign.allocator.reconciliation.liveness import Liveness
from topoalign.core.demand.shares import Share, UnitFields, check_share
from topoalign.core.hints.device_hints import DeviceProvider
from topoalign.core.model.allocations import Allocation, Owner, amounts_of
from topoalign.core.model.decisions import Explanation, Refusal
from topoalign.core.model.errors import NoFit, Unavailable, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.ports import Clock
from topoalign.core.sharing.choosers import check_gpus
from topoalign.core.sharing.reserved_shares import bounds_for, is_within
from topoalign.core.sharing.share_refusals import WholeGpuInUse
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.share_amounts import Holder, equal_part, exclusive_conflicts, larger_amount

# What is said of a container that does not start, whatever is wrong with its devices: an event of its pod, once.
#
# The kubelet tries to start the container again and again, so who refuses remembers of which one it has recorded that.


STARTED_AGAIN = "the kubelet starts the container again; see whether its device plugin directory can be read"
"""The remedy where the kubelet does not tell yet what is to be known of the container."""


def reserved_owner(reserved: NodeReservations, pod_uid: str, container: str) -> Owner | None:
    """
    A container by the names of the pod for which something is reserved: PodResources tells none of a pod that has devices by
    init containers alone. None: nothing is reserved for it, or the container is not known.
    """
    kept = next((each for each in reserved.reservations if each.pod_uid == pod_uid), None)
    if kept is None or not container:
        return None
    return Owner(namespace=kept.namespace, pod=kept.pod, container=ContainerName(container))


def record_refused_start(ledger: Ledger, owner: Owner, misfit: NoFit) -> None:
    """Records that this container was not started, and why. Raises StateFault."""
    refusal = Refusal(
        reason="PreStartContainer",
        code=misfit.code,
        finding=misfit.finding,
        remedy=misfit.remedy,
        container=owner.container,
        provider=DeviceProvider.name,
        explanation=Explanation(),
    )
    ledger.refuse(PodRequest(namespace=owner.namespace, name=owner.pod, containers=()), refusal)


MIB = 2**20
UNKNOWN = object()
"""Of an allocation that was not judged."""


class NotAsReserved(NoFit):
    """Raised for a container that holds other amounts by its slots than are reserved for it, or those of another pod."""

    code = "NotAsReserved"

    def __init__(self, slots: Sequence[DeviceID], held: Amount, reserved: str) -> None:
        super().__init__(
            f"container with {amount_text(held)} of each of {quoted(sorted(map(base_of, slots)))}: {reserved}",
            "delete the pod; a pod with slots that came past the scheduler may have taken them: use one scheduler for all",
        )


class SlotStarts:
    """Judges containers with slots of GPUs that are about to start."""

    def __init__(
        self, ledger: Ledger, clock: Clock, reserved: Callable[[], NodeReservations], grants: SlotGrants
    ) -> None:
        """`reserved`: what is reserved on the node now. `grants`: what the kubelet was told instead of it."""
        self._ledger = ledger
        self._clock = clock
        self._reserved = reserved
        self._grants = grants
        self._judged: dict[tuple[AllocationID, str], NotAsReserved | None] = {}
        """
        What was found of an allocation when its pod had this UID; empty: by its names alone, which a pod that is made anew
        has as well.
        """
        self._logged = set[AllocationID]()
        """Those of which a refusal is recorded: each once, however often the kubelet tries to start the container."""

    def observe(self) -> None:
        """
        Judges the containers that have become known, and records which have what was reserved for them although that was
        not known when they got it: their reservations end, and they may start again after that. A reservation may be
        received late, so one of which that is not known is judged each time. Raises StateFault.
        """
        live = self._ledger.state.allocations
        for name in [each for each in self._judged if each[0] not in live]:
            del self._judged[name]
        self._logged &= live.keys()
        for each in [*live.values()]:
            is_strange = each.reserved_for or each.denied
            is_doubted = is_strange or self._judged.get((each.id, each.pod_uid), UNKNOWN) is not None
            if each.owner is not None and is_doubted and self._is_offered(each):
                misfit = self._judge(each)
                if misfit is None and is_strange and self._has_bounds(each):
                    self._ledger.bind([Binding(each.id, each.owner, each.pod_uid, each.displaced, as_reserved=True)])

    def check(self, devices: Sequence[DeviceID], listing: Listing | None) -> None:
        """
        Raises NotAsReserved for a container that must not start with these slots, and records that once; and Unavailable
        where they are reserved, with other amounts than equal parts, and it is not known whose they are. Other devices are
        none of its business. `listing`: what the kubelet says; None: the record knows whose the devices are.
        """
        self.observe()
        owned = self._ledger.state.ownership
        live = self._ledger.state.allocations
        for each in (live[name] for name in owned.overlapping(map(owned.holding, devices))):
            if each.device_ids.isdisjoint(devices):
                continue
            listed = as_listed(each, listing)
            if self._is_offered(each):
                misfit = self._judge(listed, is_read=listing is not None and listing.checkpoint is not None)
            else:
                misfit = self._judged.get((each.id, listed.pod_uid))
            if misfit is not None:
                self._record(listed, misfit)
                raise misfit

    def _is_offered(self, record: Allocation) -> bool:
        """Whether it is of slots that are offered now; not so before the hardware is known."""
        return bool(record.slots) and all(
            base_of(slot) in offers_in_slots(self._ledger.state.hardware) for slot in record.slots
        )

    def _judge(self, record: Allocation, *, is_read: bool = False) -> NotAsReserved | None:
        """
        As `_misfit`. What was found before stays after the end of the reservations by which it was found, and goes where one
        that was received since tells that this container has what is reserved for it.
        """
        name = (record.id, record.pod_uid)
        found = self._misfit(record, is_read=is_read)
        if (before := self._judged.get(name)) is None or (found is None and self._has_bounds(record)):
            self._judged[name] = found
            return found
        return before

    def _misfit(self, record: Allocation, *, is_read: bool = False) -> NotAsReserved | None:
        """
        What is wrong with the amounts of an allocation by what is reserved now. `is_read`: whether the kubelet's checkpoint
        could be read, which tells pods by their UIDs. Raises Unavailable where it is not known whose the allocation is.
        """
        for resource, slots in record.devices.items():
            amounts = {slot: record.slots[slot] for slot in slots if slot in record.slots}
            if not amounts:
                continue
            most = reduce(larger_amount, amounts.values())
            kept = [*self._kept(resource)]
            own = next((reservation for reservation, *_ in kept if is_of(reservation, record)), None)
            name = None if record.owner is None else record.owner.container
            bounds = None if own is None else bounds_for(own, name, resource)
            if bounds is not None:
                if all(is_as_reserved(record, slot, bounds) for slot in amounts):
                    continue
                return NotAsReserved(slots, most, f"{amount_text(bounds[1])} are reserved for it")
            unequal = () if own is not None else self._unequal(record, amounts)  # to equal parts everybody has a right
            for reservation, container, told in kept:
                if not told.isdisjoint(unequal):  # one that takes slots over may have some of them, or others as well
                    if record.owner is None:
                        raise unknown_owner(slots)
                    whose = f"{reservation.namespace}/{reservation.pod}, container {container.container}"
                    return NotAsReserved(slots, most, f"they are reserved for {quoted([whose])}")
            is_strange = record.reserved_for and record.pod_uid not in record.reserved_for
            if is_strange or (record.denied and record.pod_uid in ("", record.denied)):
                if record.pod_uid:
                    before = "others were reserved for it, or " if not self._unequal(record, amounts) else ""
                    return NotAsReserved(slots, most, f"{before}they were reserved for another pod")
                if is_read:
                    raise unknown_owner(slots)
        return None

    def _unequal(self, record: Allocation, slots: Iterable[DeviceID]) -> list[DeviceID]:
        """Those that hold other than what they do without a reservation. What an instance has does not tell."""
        hardware = self._ledger.state.hardware
        instances = record.instances
        return [
            slot
            for slot in slots
            if slot not in instances and record.slots[slot] != equal_part(hardware, base_of(slot))
        ]

    def _has_bounds(self, record: Allocation) -> bool:
        """Whether it is known how much is reserved for this very container, of a pod that is known by its UID."""
        name = record.owner.container if record.owner is not None else None
        return record.pod_uid != "" and all(
            any(
                is_of(each, record) and bounds_for(each, name, resource) is not None
                for each, *_ in self._kept(resource)
            )
            for resource, slots in record.devices.items()
            if not record.slots.keys().isdisjoint(slots)
        )

    def _kept(self, resource: ResourceName) -> Iterator[tuple[Reservation, ReservedContainer, frozenset[DeviceID]]]:
        """What lasts of the reservations, and the slots by which each container has what is reserved for it."""
        reserved = self._reserved()
        now = self._clock.monotonic()
        for each in reserved.reservations:
            for container in each.containers if reserved.until[each.pod_uid] > now else ():
                if slots := container.devices.get(resource):
                    moved = self._grants.moved.get((each.pod_uid, container.container))
                    yield each, container, frozenset(slots) if moved is None else moved.slots

    def _record(self, record: Allocation, misfit: NotAsReserved) -> None:
        """Records that a container was not started, and why."""
        owner = record.owner
        if owner is not None and not owner.pod:  # the checkpoint has UIDs, and no names
            owner = reserved_owner(self._reserved(), record.pod_uid, owner.container)
        if record.id in self._logged or owner is None:
            return
        self._logged.add(record.id)
        record_refused_start(self._ledger, owner, misfit)


def unknown_owner(slots: Iterable[DeviceID]) -> Unavailable:
    """The refusal where it is not known whose these slots are."""
    finding = f"the kubelet does not tell yet whose the slots of {quoted(sorted(map(base_of, slots)))} are"
    return Unavailable(finding, STARTED_AGAIN)


def is_as_reserved(record: Allocation, slot: DeviceID, bounds: tuple[Amount, Amount]) -> bool:
    """Whether a slot holds something between these two; a MIG instance has at least as much memory."""
    least, most = bounds
    if slot in record.instances:
        return record.slots[slot].memory >= least.memory
    return is_within(least, record.slots[slot], most)


def as_listed(record: Allocation, listing: Listing | None) -> Allocation:
    """
    An allocation with its container by the kubelet's checkpoint, where the record does not know it: of a pod without a name.
    The same one where the checkpoint does not tell one pod, and without a container's name where several of it have them.
    """
    if record.owner is not None or listing is None:
        return record
    places = [(resource, device) for resource, ids in record.from_kubelet.items() for device in ids]
    parts = {part for place in places for part in listing.parts_by_place.get(place, ())}
    gone = listing.directories.is_gone if listing.directories is not None else lambda uid: False
    holders = {(part.pod_uid, part.container) for part in parts if not gone(part.pod_uid)}
    uids = {uid for uid, _ in holders}
    if len(uids) != 1 or "" in uids:
        return record
    container = ContainerName(next(name for _, name in holders) if len(holders) == 1 else "")
    owner = Owner(namespace=Namespace(""), pod=PodName(""), container=container)
    return msgspec.structs.replace(record, owner=owner, pod_uid=uids.pop())


def is_of(reservation: Reservation, record: Allocation) -> bool:
    """Whether it is of the pod of this allocation: by its UID, or by its names where that is not known."""
    if record.pod_uid:
        return reservation.pod_uid == record.pod_uid
    owner = record.owner
    return owner is not None and (owner.namespace, owner.pod) == (reservation.namespace, reservation.pod)


def amount_text(amount: Amount) -> str:
    """`60 cores and 6000 MiB`."""
    return f"{amount.cores} cores and {amount.memory // MIB} MiB"


# Whether a container may start with its units of GPUs.
#
# Allocate does not say for whom. When a container starts, the kubelet's checkpoint has what each container was given,
# so it is known then whether the halves of its share are of one GPU, or equal parts of the same ones, and with whom it
# shares these. One that has halves on different GPUs, that has a whole GPU of which somebody else has units, or units
# of a GPU that somebody else has whole, does not start. So no container runs with the share of another.
#
# Entries of the checkpoint count until their pods are gone. An init container leaves its units to the app containers of
# its pod: where one of two containers is not shown by PodResources, as init containers are not, they do not count
# against each other. Containers that run on although the kubelet has lost what they have are in the record alone, and
# count as well.
#
# What a unit is of is told by its id, so the configuration may have changed since.


Amounts = Mapping[DeviceID, Amount]
"""GPU -> how much of it a container has."""
MOST_LOGGED = 1_000
"""Refusals that are remembered: each is recorded once, however often the kubelet tries to start the container."""


class ShareStarts:
    """Judges containers with units of GPUs that are about to start."""

    def __init__(self, ledger: Ledger, liveness: Liveness, reserved: Callable[[], NodeReservations]) -> None:
        """`reserved`: what is reserved on the node now."""
        self._ledger = ledger
        self._liveness = liveness
        self._reserved = reserved
        self._logged: dict[tuple[Holder, str], None] = {}

    def check(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """
        Refuses to start a container with these units, and records that once, if it cannot have them together with all else
        that is held. Raises ShareSplit, InvalidShare and WholeGpuInUse, and Unavailable where the kubelet does not tell what
        the container has besides.
        """
        asked = frozenset(units)
        listing = poll.listing
        parts = live_parts(listing)
        starting = dict.fromkeys(
            Holder(part.pod_uid, part.container)
            for part in parts
            if part.resource == resource and part.devices == asked
        )
        if not starting:
            raise Unavailable(
                f"the kubelet's checkpoint does not have the {len(asked)} {resource} of the container yet",
                STARTED_AGAIN,
            )
        for mine in starting:
            try:
                self._check_container(mine, parts, poll)
            except NoFit as misfit:
                self._record(mine, listing, misfit)
                raise

    def _check_container(self, mine: Holder, parts: Sequence[Part], poll: Poll) -> None:
        """Raises ShareSplit, InvalidShare and WholeGpuInUse for a container with what these entries say."""
        fields = UnitFields(*(next(iter(named), "limits") for named in limits_of(mine, parts)))
        own = amounts_of(unit for part in of(mine, parts) for unit in part.devices)
        cores = sum(each.cores for each in own.values())
        memory = sum(each.memory for each in own.values())
        check_share(Share(cores, memory // MEMORY_BLOCK), fields)
        check_gpus(own, fields.memory, gpus=None)
        for name, theirs in self._others(mine, parts, poll):
            if gpus := exclusive_conflicts(own, theirs):
                raise WholeGpuInUse(gpus, name, fields.cores)

    def _others(self, mine: Holder, parts: Sequence[Part], poll: Poll) -> Iterator[tuple[str, Amounts]]:
        """Each other container that counts, and what it has."""
        shown = {Holder(holding.pod_uid, holding.owner.container): holding.owner for holding in poll.listing.holdings}
        listing = poll.listing
        every = [each for each in self._ledger.state.allocations.values() if each.amounts]
        records = [each for each in every if not self._liveness.has_ended(each, listing, poll.at)]
        held = {holder: {*units} for holder, units in units_held(records, every, listing, self._liveness).items()}
        for part in parts:
            held.setdefault(Holder(part.pod_uid, part.container), set()).update(part.devices)
        for each, units in held.items():
            if each == mine or not each.pod or (each.pod == mine.pod and not {each, mine} <= shown.keys()):
                continue
            if can_start(each, parts):
                owner = shown.get(each)
                named = (
                    " ".join(each) if owner is None else f"{owner.namespace}/{owner.pod}, container {owner.container},"
                )
                yield named, amounts_of(units)

    def _record(self, mine: Holder, listing: Listing, misfit: NoFit) -> None:
        """Records that a container was not started, and why: once for each container and reason."""
        if (mine, misfit.code) in self._logged:
            return
        owner = owner_of(mine, listing) or reserved_owner(self._reserved(), mine.pod, mine.container)
        if owner is None:
            return
        self._logged[mine, misfit.code] = None
        if len(self._logged) > MOST_LOGGED:
            del self._logged[next(iter(self._logged))]
        record_refused_start(self._ledger, owner, misfit)


def live_parts(listing: Listing) -> tuple[Part, ...]:
    """The entries of the checkpoint with units of GPUs, without those of pods that are gone."""
    directories = listing.directories
    return tuple(
        part
        for part in listing.parts
        if amounts_of(part.devices) and (directories is None or not directories.is_gone(part.pod_uid))
    )


def can_start(holder: Holder, parts: Collection[Part]) -> bool:
    """Whether a container may run, by what these entries say: one with halves of different GPUs never did."""
    own = amounts_of(unit for part in of(holder, parts) for unit in part.devices)
    try:
        check_gpus(own, gpus=None)
    except NoFit:
        return False
    return True


def of(holder: Holder, parts: Collection[Part]) -> Iterator[Part]:
    """The entries of one container."""
    return (part for part in parts if (part.pod_uid, part.container) == holder)


def limits_of(holder: Holder, parts: Collection[Part]) -> tuple[list[str], list[str]]:
    """The limits by which a container has computing time, and memory."""
    named: tuple[list[str], list[str]] = ([], [])
    for part in of(holder, parts):
        (amount, *_) = amounts_of(part.devices).values()
        named[0 if amount.cores else 1].append(f"limits[{part.resource}]")
    return named


def owner_of(holder: Holder, listing: Listing) -> Owner | None:
    """The container by its names, if PodResources shows it or another one of its pod; None: they are not known."""
    for holding in listing.holdings:
        if holder.pod and holding.pod_uid == holder.pod:
            owner = holding.owner
            return Owner(namespace=owner.namespace, pod=owner.pod, container=ContainerName(holder.container))
    return None
