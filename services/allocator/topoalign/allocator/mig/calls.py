"""
Creates the MIG instances for an Allocate of slots that become instances, before the call is recorded. Discovery must have
read each instance, so that its device nodes, its CDI name and its health are known.

- A slot with an own instance in a live record keeps it if the kubelet repeats its call, a container reuses the slot of
  an init container of its pod, or the former container has ended. Exception: a former container that may still run
  after the kubelet lost its checkpoint keeps its instance.
- The UUID of an instance in another live record is never used for this container, even after a reboot.
- The driver derives the uuid from the placement, so a reading can show a former instance. Therefore the instances must
  be read before the call is recorded and again before it is answered. Both waits share one deadline. If a recorded call
  fails there, its record ends like that of a pod that the kubelet rejects.
- Each slot handles one call at a time, because a restarted kubelet can repeat a call that is still in progress.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import CreatedInstance, Instances
from topoalign.allocator.ports import AskedDevices
from topoalign.allocator.reconciliation.displacement import with_devices
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import DeviceInUse, DriverFault, Unavailable
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.ports import Clock
from topoalign.core.sharing.reserved_shares import with_reserved_shares
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.share_amounts import (
    amount_of_profile,
    gpus_by_instances,
    held_by_slot,
    instances_of,
    taken_by,
)
from topoalign.runtime.tasks import wait_for_first

SEEN_SECONDS = 20.0
"""
Maximum time for discovery to read the instances of a call. Discovery reads them a second after a driver event, and
otherwise every few seconds.
"""


class InstanceCalls:
    """Creates the instances of calls, and protects them until the calls are recorded."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        instances: Instances | None,
        reserved: Callable[[], NodeReservations],
        is_displaced: Callable[[Allocation], Awaitable[bool]],
    ) -> None:
        """
        `instances`: None if none are created. `reserved`: the current reservations of the node. `is_displaced`: whether
        the container of an allocation with an owner may still run although the kubelet allocates its devices to another
        container; raises Unavailable.
        """
        self._ledger = ledger
        self._clock = clock
        self._instances = instances
        self._reserved = reserved
        self._is_displaced = is_displaced
        self._locks: dict[DeviceID, anyio.Lock] = {}
        """Slot -> the lock of its calls. Locks are never removed: there is at most one for each slot ever offered."""

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """GPU -> why its instances cannot be created."""
        return self._instances.failing if self._instances is not None else {}

    @asynccontextmanager
    async def instances_for(
        self,
        containers: AskedDevices,
        amounts: Callable[[Collection[DeviceID]], Mapping[DeviceID, Amount]],
    ) -> AsyncIterator[Mapping[DeviceID, CreatedInstance]]:
        """
        Yields slot -> its instance for slots that become instances. Discovery has read the instances when the block
        begins, and again after it. `amounts` returns the minimum amounts of the slots. Raises DeviceInUse, NoPlace,
        DriverFault, StateFault and Unavailable.
        """
        by_instances = gpus_by_instances(self._ledger.state.hardware)
        slots = [slot for each in containers for slot in each if base_of(slot) in by_instances] if by_instances else []
        if not slots:
            yield {}
            return
        if self._instances is None:
            remedy = "give discovery and allocator the same configuration, and restart the allocator"
            raise Unavailable("this allocator creates no MIG instances", remedy)
        async with AsyncExitStack() as locks:
            for slot in sorted({*slots}):
                await locks.enter_async_context(self._locks.setdefault(slot, anyio.Lock()))
            created: dict[DeviceID, CreatedInstance] = {}
            try:
                wanted = {slot: amount for each in containers for slot, amount in amounts(each).items()}
                live = self._ledger.state.allocations.values()
                bound = [
                    each for each in live if each.owner is not None and not each.instances.keys().isdisjoint(slots)
                ]
                displaced = [each.id for each in bound if await self._is_displaced(each)]
                for slot in slots:
                    known = await self._find_recorded(self._instances, slot, wanted[slot], displaced)
                    if known is not None:
                        self._instances.keep(known.uuid)
                    created[slot] = known or await self._create(self._instances, slot, wanted[slot])
                uuids = [each.uuid for each in created.values()]
                until = self._clock.monotonic() + SEEN_SECONDS
                await self._until_seen(uuids, until)
                yield created
                await self._until_seen(uuids, until)
            finally:
                for each in created.values():
                    self._instances.release(each.uuid)

    async def _create(self, instances: Instances, slot: DeviceID, amount: Amount) -> CreatedInstance:
        gpu = gpus_by_instances(self._ledger.state.hardware)[base_of(slot)]
        live = self._ledger.state.allocations.values()
        in_use = {uuid for each in live for other, uuid in each.instances.items() if other != slot}
        instance = await instances.make(slot, gpu.mig_profiles, amount.memory, self._spared(gpu.id, slot), in_use)
        profile = next(each for each in gpu.mig_profiles if each.name == instance.profile)
        return CreatedInstance(instance.uuid, amount_of_profile(profile))

    def _spared(self, gpu: DeviceID, slot: DeviceID) -> frozenset[MigPlacement]:
        """Returns the placements that other reserved slots of a GPU may need because they have no instance yet."""
        state = self._ledger.state
        now = self._clock.monotonic()
        with_reserved = with_reserved_shares(state, self._reserved(), now)
        kept = [
            with_devices(each, {name: tuple(id for id in ids if id != slot) for name, ids in each.devices.items()})
            for each in with_reserved.allocations.values()
        ]
        held = held_by_slot(state.hardware, kept).get(gpu, {})
        taken = taken_by(state.hardware.gpu_by_id[gpu], held, instances_of(kept))
        return taken if taken is not None else frozenset()

    async def _find_recorded(
        self, instances: Instances, slot: DeviceID, wanted: Amount, displaced: Collection[AllocationID]
    ) -> CreatedInstance | None:
        """
        Returns the recorded instance of this slot, except that of a `displaced` allocation, if it is ours and large
        enough. Raises DeviceInUse if it is too small and may belong to an init container of the same pod, which starts
        only after all containers have devices.
        """
        state = self._ledger.state
        for each in state.allocations.values():
            uuid = each.instances.get(slot)
            if uuid is None or slot not in each.slots or not await self._exists(instances, slot, uuid):
                continue
            if each.slots[slot].memory >= wanted.memory and each.id not in displaced:
                return CreatedInstance(uuid, each.slots[slot])
            if each.owner is None:
                raise DeviceInUse([slot], each.id)
        return None

    async def _exists(self, instances: Instances, slot: DeviceID, uuid: DeviceID) -> bool:
        """Whether an own instance exists. If discovery does not see it, queries the driver."""
        if instances.has(slot, uuid) and uuid not in self._ledger.state.hardware.parents:
            await instances.forget([each for each in instances.own if each.uuid == uuid])
        return instances.has(slot, uuid)

    async def _until_seen(self, uuids: Sequence[DeviceID], until: float) -> None:
        """Waits until discovery has read these instances. Raises DriverFault at monotonic time `until`."""
        while not all(uuid in self._ledger.state.hardware.parents for uuid in uuids):
            left = until - self._clock.monotonic()
            if left <= 0:
                finding = f"discovery does not see a new MIG instance after {SEEN_SECONDS:g} s"
                raise DriverFault(finding, "read the log of discovery, and check that the agent is root")
            await wait_for_first(
                partial(self._ledger.wait_past, self._ledger.version), partial(self._clock.sleep, left)
            )
