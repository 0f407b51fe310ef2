"""
The kubelet's way in: it has chosen, and this keeps the record.

Allocate does not say for whom. An allocation is therefore known by its set of devices, and its owner is read afterwards
from the kubelet's own list, PodResources. That list also tells what has ended: nobody calls a device plugin when a
container goes.

A kubelet that has just started lists fewer pods than run, and one whose API server is away may do so for minutes. So what
is missing is released late, later still after a restart of the kubelet, and a container that is shown with devices which
nobody holds by our record is taken in: whatever was released too early, or was there before us, is in the record again.

Allocate over devices that a live record holds is judged by that list too. If nobody shows them any more, the record has
outlived its container and makes way; if exactly this set is shown as held, the kubelet repeats itself and gets the same
answer; anything else is refused, because two containers would get one device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import anyio
import msgspec
import structlog

from topoalign.allocator.kubelet.desk import Holding, Listing, PodResources
from topoalign.allocator.ledger import Ledger
from topoalign.core.decisions import Beside
from topoalign.core.errors import DeviceInUse, DeviceUnusable, InvalidField, UnknownDevice
from topoalign.core.events import Allocation, Owner
from topoalign.core.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.placement import prefer
from topoalign.core.ports import Clock
from topoalign.core.state import NodeState

MOST_DEVICES = 20_000
"""Of one Allocate call: more than any node lists."""

SERVED = (GPU, NIC)

PREFERENCE_SECONDS = 10.0
"""For so long an Allocate may follow from a preference; the kubelet needs milliseconds."""


class Preference(NamedTuple):
    """What was preferred, of what, and when (monotonic seconds)."""

    available: frozenset[DeviceID]
    chosen: tuple[DeviceID, ...]
    at: float


log = structlog.get_logger("topoalign.allocator.handouts")


class Handouts:
    """The allocator as the kubelet front sees it (`Desk`)."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        pod_resources: PodResources,
        *,
        placement: str = "best-effort",
        gone_seconds: float = 5.0,
        unbound_seconds: float = 30.0,
        settle_seconds: float = 120.0,
    ) -> None:
        """
        How long a container must be missing before its allocation is released, and at least for two looks:
        `gone_seconds` in general; `unbound_seconds` if it was never shown and the kubelet's checkpoint does not know its
        devices either (one that was never shown and whose checkpoint cannot be read is kept); `settle_seconds` while a
        kubelet that was seen to restart settles, or lists no pod at all.
        """
        self._ledger, self._clock, self._pod_resources = ledger, clock, pod_resources
        self._placement = placement
        self._gone_seconds, self._unbound_seconds, self._settle_seconds = gone_seconds, unbound_seconds, settle_seconds
        self._turn = anyio.Lock()
        self._looking = anyio.Lock()
        self._kubelet: tuple[int, ...] | None = None
        self._settled_at = 0.0
        self._missing: dict[AllocationID, float] = {}
        self._apart: set[AllocationID] = set()
        """Allocations whose devices were shown with several owners, or some with none, at the last look."""
        self._preferred: dict[ResourceName, Preference] = {}

    @property
    def state(self) -> NodeState:
        return self._ledger.state

    @property
    def version(self) -> int:
        return self._ledger.version

    async def beyond(self, version: int) -> None:
        await self._ledger.beyond(version)

    def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        beside = Beside(free=self.state.free(resource))
        chosen = prefer(self.state.hardware, resource, available, must_include, size, self._placement, beside=beside)
        self._preferred[resource] = Preference(frozenset(available), chosen, self._clock.monotonic())
        return chosen

    async def allocate(
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]
    ) -> tuple[Allocation, ...]:
        self._check(resource, containers)
        async with self._turn:
            listing = None
            if any(device in self.state.holders for devices in containers for device in devices):
                listing = await self._pod_resources.listing()
            return self._grant(resource, containers, listing)

    def _check(self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]) -> None:
        asked = [device for devices in containers for device in devices]
        if not containers or not all(containers):
            raise InvalidField("devices_ids", "empty", "the kubelet asks for at least one device")
        if len(asked) > MOST_DEVICES or len(set(asked)) != len(asked):
            raise InvalidField("devices_ids", "a device stands twice, or there are too many", "name each device once")
        known = self.state.hardware.devices.get(resource, {})
        if unknown := [device for device in asked if device not in known]:
            raise UnknownDevice(unknown)
        for device in asked:
            health = self.state.health_of(device)
            if not health.usable:
                raise DeviceUnusable(device, "cordoned" if health.cordoned else health.state, health.reason)

    def _grant(
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]], listing: Listing | None
    ) -> tuple[Allocation, ...]:
        """Judges and records in one go: from here on nothing else can get in between."""
        self._check(resource, containers)  # once more: the hardware may have changed while PodResources was read
        shown = shown_of(resource, listing)
        order = list(self.state.hardware.devices[resource])
        answers: list[Allocation] = []
        granted: list[Allocation] = []
        gone: list[AllocationID] = []
        for devices in containers:
            asked = frozenset(devices)
            records = [self.state.allocations[name] for name in self._records(asked)]
            if len(records) == 1 and records[0].device_ids == asked <= shown:
                answers.append(records[0])
                continue
            for record in records:
                if record.device_ids & asked & shown:
                    raise DeviceInUse(sorted(record.device_ids & asked), record.id)
                gone.append(record.id)
            granted.append(
                Allocation(
                    id=self._ledger.next_id(len(granted)),
                    devices={resource: tuple(sorted(asked, key=order.index))},
                )
            )
            answers.append(granted[-1])
        deviations = self._deviations(resource, granted)
        replaced = [self.state.allocations[name] for name in dict.fromkeys(gone)]
        granted += self._remainders(resource, replaced, containers, listing, len(granted))
        self._ledger.grant(granted, instead_of=[record.id for record in replaced], preferred=deviations)
        return tuple(answers)

    def _records(self, devices: frozenset[DeviceID]) -> list[AllocationID]:
        """The live allocations that hold any of these devices, oldest first."""
        return list(dict.fromkeys(self.state.holders[d] for d in sorted(devices) if d in self.state.holders))

    def _remainders(
        self,
        resource: ResourceName,
        replaced: Sequence[Allocation],
        containers: Sequence[Sequence[DeviceID]],
        listing: Listing | None,
        granted: int,
    ) -> list[Allocation]:
        """
        What of replaced records the kubelet still has given out: an app container takes over some devices of an init
        container, and the others stay the init container's until the pod goes.
        """
        asked = {device for devices in containers for device in devices}
        held = shown_of(resource, listing)
        if listing is not None:
            held |= {device for name, device in listing.checkpoint or () if name == resource}
        rests = [
            (record, tuple(d for d in record.devices.get(resource, ()) if d in held and d not in asked))
            for record in replaced
        ]
        return [
            msgspec.structs.replace(record, id=self._ledger.next_id(granted + place), devices={resource: rest})
            for place, (record, rest) in enumerate((record, rest) for record, rest in rests if rest)
        ]

    def _deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """What was preferred, where the last preference was for such a set and another one was taken."""
        said = self._preferred.pop(resource, None)
        if said is None or len(granted) != 1 or self._clock.monotonic() - said.at > PREFERENCE_SECONDS:
            return {}
        taken = granted[0].device_ids
        if len(taken) != len(said.chosen) or not taken <= said.available or taken == set(said.chosen):
            return {}
        return {granted[0].id: said.chosen}

    async def reconcile(self) -> None:
        async with self._looking:
            asked_at = frozenset(self.state.allocations)
            self._compare(await self._pod_resources.listing(), asked_at)

    def _compare(self, listing: Listing, asked_at: frozenset[AllocationID]) -> None:
        """
        In one go. Of records, only those that were live when the kubelet was asked are judged: an answer says nothing
        about what was granted since.
        """
        now = self._clock.monotonic()
        if listing.kubelet != self._kubelet:
            age = self._clock.wall() - listing.since if self._kubelet is None else 0.0
            self._settled_at = now + max(0.0, self._settle_seconds - max(0.0, age))
            self._kubelet = listing.kubelet
            self._missing.clear()
        shown = {
            (holding.resource, device): holding.owner for holding in listing.holdings for device in holding.devices
        }
        bound: list[tuple[AllocationID, Owner]] = []
        gone: list[AllocationID] = []
        apart: set[AllocationID] = set()
        for allocation in self.state.allocations.values():
            if allocation.id not in asked_at:
                continue
            places = [(resource, device) for resource, ids in allocation.devices.items() for device in ids]
            owners = {shown.get(place) for place in places}
            if owners != {None}:
                self._missing.pop(allocation.id, None)
                owner = owners.pop()
                if owners or owner is None:
                    apart.add(allocation.id)
                elif owner != allocation.owner:
                    bound.append((allocation.id, owner))
            elif self._is_gone(allocation, places, listing, now):
                gone.append(allocation.id)
        self._ledger.bind(bound)
        self._ledger.release(gone, "gone")
        # A record that the kubelet contradicts at two looks makes way for what it shows.
        self._ledger.release(sorted(apart & self._apart), "superseded")
        self._apart = apart
        self._ledger.grant(self._unrecorded(listing.holdings, asked_at))
        self._missing = {name: since for name, since in self._missing.items() if name in self.state.allocations}

    def _is_gone(
        self, allocation: Allocation, places: Sequence[tuple[ResourceName, DeviceID]], listing: Listing, now: float
    ) -> bool:
        """Whether a container that is not shown has been missing for long enough."""
        first_look = allocation.id not in self._missing
        since = self._missing.setdefault(allocation.id, now)
        patience = self._gone_seconds
        if allocation.owner is None:
            if listing.checkpoint is None or not listing.checkpoint.isdisjoint(places):
                return False
            patience = self._unbound_seconds
        if now < self._settled_at or not listing.pods:
            patience = max(patience, self._settle_seconds)
        return not first_look and now - since >= patience

    def _unrecorded(self, holdings: Sequence[Holding], asked_at: frozenset[AllocationID]) -> list[Allocation]:
        """
        Containers that the kubelet shows with devices of ours which no record holds: they were there before us, or were
        released too early. Nothing is taken in while something was granted since the kubelet was asked.
        """
        if not asked_at >= self.state.allocations.keys():
            return []
        found: list[Allocation] = []
        taken = set(self.state.holders)
        for holding in holdings:
            listed = self.state.hardware.devices.get(holding.resource, {})
            devices = tuple(device for device in listed if device in holding.devices)
            if holding.resource in SERVED and devices and taken.isdisjoint(devices):
                taken.update(devices)
                name = self._ledger.next_id(len(found))
                found.append(Allocation(id=name, owner=holding.owner, devices={holding.resource: devices}))
        if found:
            log.warning("containers with devices that were not in the record are taken in", containers=len(found))
        return found


def shown_of(resource: ResourceName, listing: Listing | None) -> set[DeviceID]:
    """The devices of a resource that some container is shown with."""
    holdings = listing.holdings if listing is not None else ()
    return {device for holding in holdings if holding.resource == resource for device in holding.devices}
