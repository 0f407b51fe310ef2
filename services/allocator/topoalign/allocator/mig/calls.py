"""
What an Allocate of slots that become MIG instances needs before it is recorded: an instance for each slot, which discovery
has seen, so that its device nodes, its CDI name and its health are known like those of every other.

A slot of which a live record has an instance keeps it, as long as that is ours: the kubelet repeats itself, a container
takes the slot over from an init container of its pod, or the one that had it has ended. Not where a kubelet that has lost
its checkpoint gives the slot of a container that may run on to another one, which gets an instance of its own. What other
live records have is made for nobody else, also where it is gone, as after a reboot: their containers were told its uuid.

A reading of discovery may be older than the instances: one that began before an instance was made can come after one that
had a former instance with the same uuid, which the driver makes of the place. So the instances have to be seen before the
call is recorded, and again when it is to be answered; and one that a reading lacks is gone only if the driver says so.

Both waits have one deadline. A call that fails at its end after it was recorded leaves its record, which ends like that of
a pod that the kubelet refuses. A call that asks for the slot before that gets the instance: nothing is made twice.

One call at a time has a slot: a kubelet that has started anew may repeat what an earlier one asked for while that call is
still under way.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import msgspec

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import Instances, Made
from topoalign.allocator.ports import AskedDevices
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
from topoalign.runtime.tasks import either

SEEN_SECONDS = 20.0
"""
How long discovery has to see the instances of a call, until it is answered: it reads a second after the driver tells of
one, else every some seconds.
"""


def without_slot(allocation: Allocation, slot: DeviceID) -> Allocation:
    """The same without a slot."""
    if slot not in allocation.device_ids:
        return allocation
    return msgspec.structs.replace(
        allocation,
        devices={name: tuple(each for each in ids if each != slot) for name, ids in allocation.devices.items()},
        co_allocated=(),
        virtual_functions={},
        slots={each: amount for each, amount in allocation.slots.items() if each != slot},
        instances={each: uuid for each, uuid in allocation.instances.items() if each != slot},
    )


class InstanceCalls:
    """Makes the instances of calls, and keeps them until the calls are recorded."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        instances: Instances | None,
        reserved: Callable[[], NodeReservations],
        is_displaced: Callable[[Allocation], Awaitable[bool]],
    ) -> None:
        """
        `instances`: None where none are made. `reserved`: what is reserved on the node now. `is_displaced`: whether the
        container of a bound allocation may run on, whose devices the kubelet gives to another one; raises Unavailable.
        """
        self._ledger = ledger
        self._clock = clock
        self._instances = instances
        self._reserved = reserved
        self._is_displaced = is_displaced
        self._turns: dict[DeviceID, anyio.Lock] = {}
        """Of the calls for a slot. None is removed: there is one at most for each slot that discovery has ever offered."""
        if instances is not None:
            instances.when_changed = lambda: ledger.move(ledger.state)

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """GPU -> why instances of it cannot be made."""
        return self._instances.failing if self._instances is not None else {}

    @asynccontextmanager
    async def instances_for(
        self,
        containers: AskedDevices,
        amounts: Callable[[Collection[DeviceID]], Mapping[DeviceID, Amount]],
    ) -> AsyncIterator[Mapping[DeviceID, Made]]:
        """
        Slot -> its instance, which is made and kept in this block, for the slots of containers that become one; discovery
        sees it when the block begins and when it has ended. `amounts`: what is to be held by slots at least. Raises
        DeviceInUse, NoPlace, DriverFault, StateFault and Unavailable; then none is kept, unless the record holds it.
        """
        by_instances = gpus_by_instances(self._ledger.state.hardware)
        slots = [slot for each in containers for slot in each if base_of(slot) in by_instances] if by_instances else []
        if not slots:
            yield {}
            return
        if self._instances is None:
            remedy = "give discovery and allocator the same configuration, and start the allocator anew"
            raise Unavailable("this allocator makes no MIG instances", remedy)
        async with AsyncExitStack() as turns:
            for slot in sorted({*slots}):
                await turns.enter_async_context(self._turns.setdefault(slot, anyio.Lock()))
            made: dict[DeviceID, Made] = {}
            try:
                wanted = {slot: amount for each in containers for slot, amount in amounts(each).items()}
                displaced = await self._displaced_from(slots)
                for slot in slots:
                    known = await self._known(self._instances, slot, wanted[slot], displaced)
                    if known is not None:
                        self._instances.keep(known.uuid)
                    made[slot] = known or await self._made(self._instances, slot, wanted[slot])
                uuids = [each.uuid for each in made.values()]
                until = self._clock.monotonic() + SEEN_SECONDS
                await self._until_seen(uuids, until)
                yield made
                await self._until_seen(uuids, until)
            finally:
                for each in made.values():
                    self._instances.release(each.uuid)

    async def _made(self, instances: Instances, slot: DeviceID, amount: Amount) -> Made:
        gpu = gpus_by_instances(self._ledger.state.hardware)[base_of(slot)]
        live = self._ledger.state.allocations.values()
        told = {uuid for each in live for other, uuid in each.instances.items() if other != slot}
        made = await instances.make(slot, gpu.mig_profiles, amount.memory, self._spared(gpu.id, slot), told)
        profile = next(each for each in gpu.mig_profiles if each.name == made.profile)
        return Made(made.uuid, amount_of_profile(profile))

    def _spared(self, gpu: DeviceID, slot: DeviceID) -> frozenset[MigPlacement]:
        """The places that the other slots of a GPU may need which are reserved and have no instance yet."""
        state = self._ledger.state
        now = self._clock.monotonic()
        beside = with_reserved_shares(state, self._reserved(), now)
        kept = [without_slot(each, slot) for each in beside.allocations.values()]
        held = held_by_slot(state.hardware, kept).get(gpu, {})
        taken = taken_by(state.hardware.gpu_by_id[gpu], held, instances_of(kept))
        return taken if taken is not None else frozenset()

    async def _displaced_from(self, slots: Collection[DeviceID]) -> frozenset[AllocationID]:
        """The allocations with instances for these slots whose containers may run beside another one. Raises Unavailable."""
        live = self._ledger.state.allocations.values()
        bound = [each for each in live if each.owner is not None and not each.instances.keys().isdisjoint(slots)]
        return frozenset([each.id for each in bound if await self._is_displaced(each)])

    async def _known(
        self, instances: Instances, slot: DeviceID, wanted: Amount, displaced: Collection[AllocationID]
    ) -> Made | None:
        """
        The instance that a live record has for this slot, but for those of `displaced`, if it is ours, there and large
        enough. Raises DeviceInUse where it is too small and may be that of an init container of the same pod, which begins
        when all containers have theirs.
        """
        state = self._ledger.state
        for each in state.allocations.values():
            uuid = each.instances.get(slot)
            if uuid is None or slot not in each.slots or not await self._is_there(instances, slot, uuid):
                continue
            if each.slots[slot].memory >= wanted.memory and each.id not in displaced:
                return Made(uuid, each.slots[slot])
            if each.owner is None:
                raise DeviceInUse([slot], each.id)
        return None

    async def _is_there(self, instances: Instances, slot: DeviceID, uuid: DeviceID) -> bool:
        """Whether an instance of ours is there. Where discovery does not see it the driver is asked, which knows better."""
        if instances.has(slot, uuid) and uuid not in self._ledger.state.hardware.cards:
            await instances.forget([each for each in instances.own if each.uuid == uuid])
        return instances.has(slot, uuid)

    async def _until_seen(self, uuids: Sequence[DeviceID], until: float) -> None:
        """
        Returns as soon as discovery's newest reading has these instances, in the same turn of the event loop. Raises
        DriverFault where that lacks one at the monotonic second `until`, or later.
        """
        while not all(uuid in self._ledger.state.hardware.cards for uuid in uuids):
            left = until - self._clock.monotonic()
            if left <= 0:
                finding = f"discovery does not see a new MIG instance after {SEEN_SECONDS:g} s"
                raise DriverFault(finding, "see what the log of discovery says, and whether the agent is root")
            await either(partial(self._ledger.wait_past, self._ledger.version), partial(self._clock.sleep, left))
