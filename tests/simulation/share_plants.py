"""
Defects planted on purpose where GPUs are given by amounts: in what is counted, in what may start, and in what limits.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from simulation.limiters import SocketlessLimiter

from topoalign.allocator.allocate.pre_start import ShareStarts
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.allocate.slots import SlotClaim
from topoalign.allocator.allocate.units import UnitClaim
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup, DirectoryOwner
from topoalign.allocator.containers.vcuda import unit_directories
from topoalign.allocator.containers.vcuda.unit_directories import Limits
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import AskedDevices, Poll
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.sharing.choosers import units_on
from topoalign.core.sharing.reserved_shares import ShareQuestion
from topoalign.core.sharing.share_refusals import ShareDoesNotFit
from topoalign.core.state.fold import NodeState
from topoalign.core.state.ownership import Ownership


class LavishSlots(SlotClaim):
    """Of no GPU is there ever too little left."""

    def _lacking(self, amounts: Mapping[DeviceID, Amount], held: Sequence[Allocation]) -> ShareDoesNotFit | None:
        return None


class LavishDeviceAllocations(DeviceAllocations):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self._slots.__class__ = LavishSlots


class EverythingStarts(ShareStarts):
    """Whatever the kubelet has put together is a share."""

    def check(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        pass


class HeedlessDeviceAllocations(DeviceAllocations):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self._share_starts.__class__ = EverythingStarts


class ExaggeratingDeviceAllocations(DeviceAllocations):
    """Containers are told of twice the memory that is recorded for them."""

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        granted = await super().allocate(resource, containers)
        return tuple(msgspec.structs.replace(each, slots=twice(each.slots)) for each in granted)


class MisdirectingDeviceAllocations(DeviceAllocations):
    """Containers are told of the GPU after the one that is recorded for them."""

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        return tuple(map(next_card, await super().allocate(resource, containers)))


def next_card(allocation: Allocation) -> Allocation:
    after = {DeviceID(f"GPU-{n}"): f"GPU-{(n + 1) % 3}" for n in range(3)}
    devices = {
        resource: tuple(DeviceID(each.replace(base_of(each), after.get(base_of(each), base_of(each)))) for each in ids)
        for resource, ids in allocation.devices.items()
    }
    return msgspec.structs.replace(allocation, devices=devices, slots={})


def twice(slots: Mapping[DeviceID, Amount]) -> dict[DeviceID, Amount]:
    return {slot: msgspec.structs.replace(each, memory=2 * each.memory) for slot, each in slots.items()}


class PresentOwnership(Ownership):
    """What is held under a former offer blocks nothing."""

    @cached_property
    def blocked(self) -> frozenset[DeviceID]:
        return frozenset()


class PresentState(NodeState, frozen=True, kw_only=True, dict=True):
    """Knows no former offers."""

    @cached_property
    def ownership(self) -> Ownership:
        return PresentOwnership(self.hardware, self.allocations, self.reported_health, self.ended)


class PresentLedger(Ledger):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self.state = PresentState(**msgspec.structs.asdict(self.state))


class KeepingLimiter(SocketlessLimiter):
    """A directory that is there is good for whoever has the units next."""

    async def _prepare(self, root: Path, name: str, limits: Limits) -> None:
        if unit_directories.read_config_owner(root, name) is None:
            await super()._prepare(root, name, limits)


class MistakingSweeps(DirectoryCleanup):
    """All directories are those of one record."""

    def _held(self, state: NodeState) -> dict[str, DirectoryOwner | None]:
        found = super()._held(state)
        owner = next((each for each in found.values() if each is not None and each.pod_uid), None)
        return dict.fromkeys(found, owner or DirectoryOwner(AllocationID("")))


class IdleSweeps(DirectoryCleanup):
    """What is gone stays gone, and what is left over stays."""

    def clean_up(self, state: NodeState, poll: Poll | None) -> None:
        pass


class SpreadingShares(UnitClaim):
    """Half of an even number of units is of another GPU, whether or not that is reserved."""

    def prefer(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...]:
        chosen = super().prefer(live, question, displaced, poll)
        if question.must_include or question.size % 2 or len(amounts_of(chosen)) != 1:
            return chosen
        available = live.hardware.devices[question.resource].some(question.available)
        gpus = sorted({base_of(unit) for unit in question.available})[:2]
        return units_on(available, (), question.size, gpus)

    def check(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        pass


class SpreadingDeviceAllocations(DeviceAllocations):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self._units.__class__ = SpreadingShares
