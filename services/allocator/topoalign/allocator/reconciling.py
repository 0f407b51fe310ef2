"""
The record against the kubelet's own: who holds what, what has ended, and what nobody recorded.

A kubelet that has just started lists fewer pods than run, and one whose API server is away may do so for minutes. So what
is missing is released late, later still after a restart of the kubelet, and a container that is shown with devices which
nobody holds by our record is taken in: whatever was released too early, or was there before us, is in the record again.

What ended while nobody looked is an orphan. It goes at the first look, if the kubelet has settled and its checkpoint does
not know the devices either: two accounts of its own agree then.

A record in doubt, after a journal that was damaged, is made whole here: beside what PodResources shows, what the checkpoint
has given to containers that it does not show is taken in, too, and then the record is confirmed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog

from topoalign.allocator.kubelet.desk import Holding, Listing
from topoalign.allocator.ledger import Ledger
from topoalign.allocator.order import in_order
from topoalign.allocator.usage import beyond, is_ours
from topoalign.core.events import Allocation, Owner
from topoalign.core.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock

Place = tuple[ResourceName, DeviceID]

log = structlog.get_logger("topoalign.allocator.reconciling")


class Look(NamedTuple):
    """What the kubelet answered, and about what."""

    listing: Listing
    live: frozenset[AllocationID]
    """The allocations that were live when it was asked: an answer says nothing about what was granted since."""
    at: float
    """Monotonic seconds at which it was asked."""


class Reconciliation:
    """Compares look by look. Synchronous throughout: nothing gets in between."""

    def __init__(
        self, ledger: Ledger, clock: Clock, *, gone_seconds: float, unbound_seconds: float, settle_seconds: float
    ) -> None:
        """
        How long a container must be missing before its allocation is released, and at least for two looks:
        `gone_seconds` in general; `unbound_seconds` if it was never shown and the kubelet's checkpoint does not know its
        devices either (one that was never shown and whose checkpoint cannot be read is kept); `settle_seconds` while a
        kubelet that was seen to restart settles, or lists no pod at all.
        """
        self._ledger, self._clock = ledger, clock
        self._gone_seconds, self._unbound_seconds, self._settle_seconds = gone_seconds, unbound_seconds, settle_seconds
        self._kubelet: tuple[int, ...] | None = None
        self._boot_known = False
        """Whether a look was taken since the hardware is known, and with it the boot."""
        self._settled_at = 0.0
        self._missing: dict[AllocationID, float] = {}
        self._apart: set[AllocationID] = set()
        """Allocations whose devices were shown with several owners, some with none, or with others, at the last look."""
        self._unseen = set(ledger.state.allocations)
        """Live at our start, and not shown since: should they have ended, then while nobody looked."""

    def compare(self, look: Look) -> None:
        """
        Raises StateFault, with part of it recorded. Before the hardware is known it only takes note of the kubelet: which
        devices are ours cannot be told then.
        """
        self._settle(look)
        if self._ledger.state.topology is None:
            return
        boot = self._ledger.boot
        shown = {(holding.resource, device): holding for holding in look.listing.holdings for device in holding.devices}
        bound: list[tuple[AllocationID, Owner]] = []
        gone: list[AllocationID] = []
        apart: set[AllocationID] = set()
        for allocation in self._ledger.state.allocations.values():
            if allocation.id not in look.live:
                continue
            held = places(allocation)
            holdings = [shown.get(place) for place in held]
            if any(holdings):
                self.seen(allocation.id)
                owner = self._owner(held, holdings)
                if owner is None:
                    apart.add(allocation.id)
                elif owner != allocation.owner or (boot and boot != allocation.boot):
                    bound.append((allocation.id, owner))
            elif self._is_gone(allocation, held, look):
                gone.append(allocation.id)
        self._ledger.bind(bound)
        self._ledger.release([name for name in gone if name not in self._unseen], "gone")
        self._ledger.release([name for name in gone if name in self._unseen], "orphan")
        live = self._ledger.state.allocations
        if look.live >= live.keys():  # else the answer is older than the record
            # A record that the kubelet contradicts at two looks makes way for what it shows.
            contradicted = [live[name] for name in sorted(apart & self._apart)]
            found = self._unrecorded(look.listing, contradicted)
            self._ledger.grant(found, instead_of=[record.id for record in contradicted])
            if found:
                log.warning("containers with devices that were not in the record are taken in", containers=len(found))
            self._confirm(look)
        self._apart = apart
        live = self._ledger.state.allocations
        self._missing = {name: since for name, since in self._missing.items() if name in live}
        self._unseen &= live.keys()
        self._ledger.observe(beyond(look.listing.usage, self._ledger.state.hardware))

    def _settle(self, look: Look) -> None:
        """
        Takes note of a new kubelet. Its age is told by the wall clock, which may have been set since; after a reboot it
        has been, often enough, and then the kubelet counts as new however old it looks.
        """
        state = self._ledger.state
        rebooted = not self._boot_known and bool(state.stale)
        self._boot_known |= state.topology is not None
        if look.listing.kubelet == self._kubelet and not rebooted:
            return
        known = self._kubelet is not None or rebooted
        age = 0.0 if known else max(0.0, self._clock.wall() - look.listing.since)
        self._settled_at = look.at + max(0.0, self._settle_seconds - age)
        self._kubelet = look.listing.kubelet
        self._missing.clear()
        if stale := state.stale:
            log.info(
                "allocations from before the reboot are kept until the kubelet has settled", allocations=len(stale)
            )

    def seen(self, allocation: AllocationID) -> None:
        """The kubelet has just shown or named it as held: whatever was asked of it before says nothing against that."""
        self._missing.pop(allocation, None)
        self._unseen.discard(allocation)

    def _owner(self, held: Sequence[Place], holdings: Sequence[Holding | None]) -> Owner | None:
        """
        Who is shown with just what a record has. None: several are, or one with a part of it, or one with more of ours,
        which is not to look free.
        """
        hardware = self._ledger.state.hardware
        owners = {holding.owner if holding is not None else None for holding in holdings}
        whole = {
            (holding.resource, device)
            for holding in filter(None, holdings)
            for device in holding.devices
            if is_ours(hardware, holding.resource, device)
        }
        return owners.pop() if len(owners) == 1 and whole <= {*held} else None

    def _is_settled(self, look: Look) -> bool:
        return look.at >= self._settled_at and look.listing.pods > 0

    def _is_gone(self, allocation: Allocation, held: Sequence[Place], look: Look) -> bool:
        """Whether a container that is not shown has been missing for long enough."""
        first_look = allocation.id not in self._missing
        since = self._missing.setdefault(allocation.id, look.at)
        given = look.listing.checkpoint
        kept = given is None or not given.isdisjoint(held)
        settled = self._is_settled(look)
        patience = self._gone_seconds
        if allocation.owner is None:
            if kept:
                return False
            patience = self._unbound_seconds
        elif allocation.id in self._unseen and settled and not kept:
            return True
        if not settled:
            patience = max(patience, self._settle_seconds)
        return not first_look and look.at - since >= patience

    def _unrecorded(self, listing: Listing, contradicted: Sequence[Allocation]) -> list[Allocation]:
        """
        Containers that the kubelet shows with devices of ours which no record holds: they were there before us, or were
        released too early. Of contradicted records also what an init container may still have, which is shown nowhere: what
        the kubelet's checkpoint has of them, or all where it cannot be read. While the record is in doubt, all that the
        checkpoint has given to containers not shown.
        """
        others = {name: held for name, held in self._ledger.state.allocations.items() if held not in contradicted}
        state = msgspec.structs.replace(self._ledger.state, allocations=others)
        found: list[Allocation] = []
        taken: set[DeviceID] = set()
        parted: set[DeviceID] = set()  # what has been found is a part of these, or these themselves

        def is_free(device: DeviceID) -> bool:
            ways = state.ways_to(device)
            return not state.overlapping([device]) and device not in parted and taken.isdisjoint(ways)

        def take_in(owner: Owner | None, resource: ResourceName, devices: tuple[DeviceID, ...]) -> None:
            name = self._ledger.next_id(len(found))
            cards = state.cards_of(devices)
            found.append(
                Allocation(id=name, owner=owner, devices={resource: devices}, boot=self._ledger.boot, cards=cards)
            )
            taken.update(devices)
            parted.update(way for device in devices for way in state.ways_to(device))

        for holding in listing.holdings:
            ours = self._ordered(holding.resource, holding.devices)
            if ours and all(map(is_free, ours)):
                take_in(holding.owner, holding.resource, ours)
        left = {place for each in contradicted for place in places(each)} - shown_of(listing)
        unread = tuple((resource, frozenset({device})) for resource, device in sorted(left))
        parts = listing.parts if listing.checkpoint is not None else unread
        for resource, devices in parts:
            held = frozenset(d for d in devices if self._ledger.doubt is not None or (resource, d) in left)
            if ours := tuple(filter(is_free, self._ordered(resource, held))):
                take_in(None, resource, ours)
        return found

    def _ordered(self, resource: ResourceName, devices: frozenset[DeviceID]) -> tuple[DeviceID, ...]:
        """Those that are ours, in the hardware's order."""
        hardware = self._ledger.state.hardware
        return in_order(hardware, resource, (device for device in devices if is_ours(hardware, resource, device)))

    def _confirm(self, look: Look) -> None:
        """
        Ends the doubt. A checkpoint knows all that its kubelet gave away; without one, a kubelet that has settled shows all
        that run.
        """
        if self._ledger.doubt is None:
            return
        if look.listing.checkpoint is not None or self._is_settled(look):
            self._ledger.confirm("the kubelet")


def places(allocation: Allocation) -> list[Place]:
    return [(resource, device) for resource, ids in allocation.devices.items() for device in ids]


def shown_of(listing: Listing | None) -> frozenset[Place]:
    """The devices that some container is shown with."""
    holdings = listing.holdings if listing is not None else ()
    return frozenset((holding.resource, device) for holding in holdings for device in holding.devices)
