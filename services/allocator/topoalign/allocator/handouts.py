"""
The kubelet's way in: it has chosen, and this keeps the record.

Allocate does not say for whom. An allocation is therefore known by its set of devices, and its owner is read afterwards
from the kubelet's own list, PodResources. That list also tells what has ended: nobody calls a device plugin when a
container goes.

Allocate over devices that a live record holds is judged by that list too. If nobody shows them any more, the record has
outlived its container and makes way; if exactly this set is shown as held, the kubelet repeats itself and gets the same
answer; anything else is refused, because two containers would get one device.
"""

from collections.abc import Sequence

import anyio
import structlog

from topoalign.allocator.kubelet.desk import Holding, PodResources
from topoalign.allocator.ledger import Ledger
from topoalign.core.errors import DeviceInUse, DeviceUnusable, InvalidField, UnknownDevice
from topoalign.core.events import Allocation, Owner
from topoalign.core.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.placement import prefer
from topoalign.core.ports import Clock
from topoalign.core.state import NodeState

MOST_DEVICES = 20_000
"""Of one Allocate call: more than any node lists."""

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
    ) -> None:
        """
        `gone_seconds`: how long a container must be missing from PodResources before its allocation is released; more
        than one look, because a kubelet that has just started lists fewer pods than run. `unbound_seconds`: the same
        for an allocation that PodResources has never shown, as the kubelet lists it a moment after Allocate.
        """
        self._ledger, self._clock, self._pod_resources = ledger, clock, pod_resources
        self._placement = placement
        self._gone_seconds, self._unbound_seconds = gone_seconds, unbound_seconds
        self._turn = anyio.Lock()
        self._missing: dict[AllocationID, float] = {}
        self._preferred: dict[ResourceName, tuple[frozenset[DeviceID], tuple[DeviceID, ...]]] = {}

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
        chosen = prefer(self.state.hardware, resource, available, must_include, size, self._placement)
        self._preferred[resource] = (frozenset(available), chosen)
        return chosen

    async def allocate(
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]
    ) -> tuple[Allocation, ...]:
        self._check(resource, containers)
        async with self._turn:
            holdings: tuple[Holding, ...] = ()
            if any(device in self.state.holders for devices in containers for device in devices):
                holdings = await self._pod_resources.holdings()
            return self._grant(resource, containers, holdings)

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
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]], holdings: Sequence[Holding]
    ) -> tuple[Allocation, ...]:
        """Judges and records in one go: from here on nothing else can get in between."""
        self._check(resource, containers)  # once more: the hardware may have changed while PodResources was read
        shown = {device for holding in holdings for device in holding.devices}
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
                if record.device_ids & shown:
                    raise DeviceInUse(sorted(record.device_ids & asked), record.id)
                gone.append(record.id)
            granted.append(
                Allocation(
                    id=self._ledger.next_id(len(granted)),
                    devices={resource: tuple(sorted(asked, key=order.index))},
                )
            )
            answers.append(granted[-1])
        self._ledger.grant(granted, instead_of=gone, preferred=self._deviations(resource, granted))
        return tuple(answers)

    def _records(self, devices: frozenset[DeviceID]) -> list[AllocationID]:
        """The live allocations that hold any of these devices, oldest first."""
        return list(dict.fromkeys(self.state.holders[d] for d in sorted(devices) if d in self.state.holders))

    def _deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """What was preferred, where the last preference was for such a set and another one was taken."""
        available, preferred = self._preferred.pop(resource, (frozenset(), ()))
        return {
            allocation.id: preferred
            for allocation in granted
            if len(granted) == 1
            and len(allocation.device_ids) == len(preferred)
            and allocation.device_ids <= available
            and allocation.device_ids != set(preferred)
        }

    async def reconcile(self) -> None:
        holdings = await self._pod_resources.holdings()
        holders = {device: holding.owner for holding in holdings for device in holding.devices}
        now = self._clock.monotonic()
        bound: list[tuple[AllocationID, Owner]] = []
        gone: list[AllocationID] = []
        for allocation in self.state.allocations.values():
            owners = {holders.get(device) for device in allocation.device_ids}
            if owners == {None}:
                since = self._missing.setdefault(allocation.id, now)
                patience = self._gone_seconds if allocation.owner is not None else self._unbound_seconds
                if now - since >= patience:
                    gone.append(allocation.id)
                continue
            self._missing.pop(allocation.id, None)
            owner = owners.pop()
            if owners or owner is None:
                log.warning("devices of one allocation are shown apart", allocation=allocation.id)
            elif owner != allocation.owner:
                bound.append((allocation.id, owner))
        self._ledger.bind(bound)
        self._ledger.release(gone, "gone")
        self._missing = {name: since for name, since in self._missing.items() if name in self.state.allocations}
