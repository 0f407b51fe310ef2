"""
What an Allocate of slots that become MIG instances needs before it is recorded: an instance for each slot, which discovery
has seen, so that its device nodes, its CDI name and its health are known like those of every other.

A slot of which a live record has an instance keeps it, as long as that is ours: the kubelet repeats itself, or a container
takes the slot over from an init container of its pod. What other live records have is made for nobody else, also where it is
gone, as after a reboot: their containers were told its uuid.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from topoalign.allocator.instances.instances import Instances
from topoalign.allocator.instances.made import Made
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import DriverFault, Unavailable
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.ports import Clock
from topoalign.core.sharing.reserved_units import with_reserved_shares
from topoalign.core.state.instance_amounts import amount_of, gpus_by_instances, instances_of
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.slot_amounts import held_by_slot, taken_by
from topoalign.runtime.tasks import either

SEEN_SECONDS = 20.0
"""How long discovery has to see an instance: it reads a second after the driver tells of it, else every some seconds."""


def without_slot(allocation: Allocation, slot: DeviceID) -> Allocation:
    """The same without a slot."""
    if slot not in allocation.device_ids:
        return allocation
    return msgspec.structs.replace(
        allocation,
        devices={name: tuple(each for each in ids if each != slot) for name, ids in allocation.devices.items()},
        companions=(),
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
        reserved: Callable[[], NodeReservations] = NodeReservations,
    ) -> None:
        """`instances`: None where none are made. `reserved`: what is reserved on the node now."""
        self._ledger, self._clock, self._instances, self._reserved = ledger, clock, instances, reserved
        if instances is not None:
            instances.when_changed = lambda: ledger.move(ledger.state)

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """GPU -> why instances of it cannot be made."""
        return self._instances.failing if self._instances is not None else {}

    @asynccontextmanager
    async def instances_for(
        self,
        containers: Sequence[Sequence[DeviceID]],
        amounts: Callable[[Sequence[DeviceID]], Mapping[DeviceID, Amount]],
    ) -> AsyncIterator[Mapping[DeviceID, Made]]:
        """
        Slot -> its instance, which is made and kept in this block, for the slots of containers that become one. `amounts`:
        what is to be held by slots at least. Raises NoPlace, DriverFault, StateFault and Unavailable; then none is kept.
        """
        by_instances = gpus_by_instances(self._ledger.state.hardware)
        slots = [slot for each in containers for slot in each if base_of(slot) in by_instances] if by_instances else []
        if not slots:
            yield {}
            return
        if self._instances is None:
            remedy = "give discovery and allocator the same configuration, and start the allocator anew"
            raise Unavailable("this allocator makes no MIG instances", remedy)
        made: dict[DeviceID, Made] = {}
        try:
            wanted = {slot: amount for each in containers for slot, amount in amounts(each).items()}
            for slot in slots:
                known = self._known(self._instances, slot, wanted[slot])
                if known is not None:
                    self._instances.keep(known.uuid)
                made[slot] = known or await self._made(self._instances, slot, wanted[slot])
            await self._until_seen([each.uuid for each in made.values()])
            yield made
        finally:
            for each in made.values():
                self._instances.release(each.uuid)

    async def _made(self, instances: Instances, slot: DeviceID, amount: Amount) -> Made:
        gpu = gpus_by_instances(self._ledger.state.hardware)[base_of(slot)]
        live = self._ledger.state.allocations.values()
        told = {uuid for each in live for other, uuid in each.instances.items() if other != slot}
        made = await instances.make(slot, gpu.mig_profiles, amount.memory, self._spared(gpu.id, slot), told)
        profile = next(each for each in gpu.mig_profiles if each.name == made.profile)
        return Made(made.uuid, amount_of(profile))

    def _spared(self, gpu: DeviceID, slot: DeviceID) -> frozenset[MigPlacement]:
        """The places that the other slots of a GPU may need which are reserved and have no instance yet."""
        state, now = self._ledger.state, self._clock.monotonic()
        beside = with_reserved_shares(state, self._reserved(), now)
        kept = [without_slot(each, slot) for each in beside.allocations.values()]
        held = held_by_slot(state.hardware, kept).get(gpu, {})
        taken = taken_by(state.hardware.gpu_by_id[gpu], held, instances_of(kept))
        return taken if taken is not None else frozenset()

    def _known(self, instances: Instances, slot: DeviceID, wanted: Amount) -> Made | None:
        """The instance that a live record has for this slot, if it is ours, there and large enough."""
        state = self._ledger.state
        for each in state.allocations.values():
            uuid = each.instances.get(slot)
            if uuid is None or uuid not in state.hardware.cards or not instances.has(slot, uuid):
                continue
            if slot in each.slots and each.slots[slot].memory >= wanted.memory:
                return Made(uuid, each.slots[slot])
        return None

    async def _until_seen(self, uuids: Sequence[DeviceID]) -> None:
        """Waits until discovery tells of these instances. Raises DriverFault where it does not for `SEEN_SECONDS`."""

        async def seen() -> None:
            while not all(uuid in self._ledger.state.hardware.cards for uuid in uuids):
                await self._ledger.wait_past(self._ledger.version)

        await either(seen, partial(self._clock.sleep, SEEN_SECONDS))
        if not all(uuid in self._ledger.state.hardware.cards for uuid in uuids):
            finding = f"discovery has not seen a new MIG instance for {SEEN_SECONDS:g} s"
            raise DriverFault(finding, "see what the log of discovery says, and whether the agent is root")
