"""
Defects planted on purpose: a simulation that does not find these finds nothing.

Each breaks one invariant. Those of I1 do so in the way in which real allocators broke it (kubernetes 137534, HAMi-core
273): between choosing and reserving there is a pause, or what was chosen is not looked at again.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple

import anyio
import msgspec
from simulation.bus import FaultyBus
from simulation.instance_plants import HastyInstances, LeakingInstances, TidyingInstances
from simulation.limiters import SocketlessLimiter
from simulation.node import Parts
from simulation.share_plants import (
    ExaggeratingDeviceAllocations,
    HeedlessDeviceAllocations,
    IdleSweeps,
    KeepingLimiter,
    LavishDeviceAllocations,
    MisdirectingDeviceAllocations,
    MistakingSweeps,
    PresentLedger,
    SpreadingDeviceAllocations,
)

from topoalign.allocator.allocate.claims import NodeView
from topoalign.allocator.allocate.grants import AllocateCall, Grants, GroupCommit
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup
from topoalign.allocator.ledger.ledger import Ledger, UnsequencedFact
from topoalign.allocator.mig.instances import Instances
from topoalign.allocator.ports import AskedDevices, KubeletListing
from topoalign.allocator.reconciliation.liveness import LivenessCheck, kubelet_places
from topoalign.allocator.requests.admissions import Admissions
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.decisions import Decision
from topoalign.core.model.errors import IdTaken, StateFault, TopoalignError
from topoalign.core.model.events import Allocation, AllocationReleased, AllocationsSnapshot, LedgerEvent
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.placement.preference import prefer
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState
from topoalign.core.state.ownership import Ownership
from topoalign.runtime import event_stores


class NoTurn:
    """Stands where a lock should be."""

    async def __aenter__(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await anyio.lowlevel.checkpoint()


class PausingAdmissions(Admissions):
    """Decides, pauses, and records what it decided, although another has been given the devices meanwhile."""

    async def _decide(self, demand: PodDemand) -> Decision:
        self._turn = NoTurn()  # type: ignore[assignment]  # that is the defect
        decision = await super()._decide(demand)
        await anyio.lowlevel.checkpoint()
        return decision


class PatientAdmissions(Admissions):
    """Grants whatever comes, however late."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deadlines.check = lambda deadline, request: None  # type: ignore[method-assign]  # that is the defect


class PastView(NodeView):
    """Shows a state of the past, where it has one."""

    seen: NodeState | None = None

    @property
    def state(self) -> NodeState:
        return self.seen or self._state()


class PlantedDeviceAllocations(DeviceAllocations):
    """With grants that have a defect."""

    grants: type[Grants] = Grants

    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self._grants.__class__ = self.grants
        self._grants._view.__class__ = PastView
        self._commits = GroupCommit(self._grants.record)


class PausingDeviceAllocations(PlantedDeviceAllocations):
    """Looks at the record, pauses, and records what the kubelet chose by what it saw before."""

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        view = self._grants._view
        assert isinstance(view, PastView)
        call, seen = AllocateCall(resource, containers, -1), self._ledger.state
        await anyio.lowlevel.checkpoint()
        view.seen = seen
        try:
            self._grants.record([call])
        finally:
            view.seen = None
        answers = call.result()
        return answers if answers is not None else await super().allocate(resource, containers)


class HastyGrants(Grants):
    """Judges all calls of a group by the state before them."""

    def record(self, calls: Sequence[AllocateCall]) -> None:
        assert isinstance(self._view, PastView)
        self._view.seen = self._ledger.state
        try:
            super().record(calls)
        finally:
            self._view.seen = None


class HastyDeviceAllocations(PlantedDeviceAllocations):
    grants = HastyGrants


class HalvingLedger(Ledger):
    """Of several allocations that ended it releases only some."""

    def release(self, allocations: Sequence[AllocationID], reason: str) -> None:
        super().release(allocations[: len(allocations) // 2], reason)


class TrustingGrants(Grants):
    """Gives whatever it is asked for."""

    def check(self, resource: ResourceName, containers: AskedDevices) -> AskedDevices:
        return containers


class TrustingDeviceAllocations(PlantedDeviceAllocations):
    grants = TrustingGrants


class TerseGrants(Grants):
    """Refuses without a word of what to do."""

    def check(self, resource: ResourceName, containers: AskedDevices) -> AskedDevices:
        try:
            return super().check(resource, containers)
        except TopoalignError as error:
            error.remedy = ""
            raise


class TerseDeviceAllocations(PlantedDeviceAllocations):
    grants = TerseGrants


class GenerousOwnership(Ownership):
    """What is held is free, too."""

    def free(self, resource: ResourceName) -> DeviceSet:
        return self.handed_out.healthy(resource)


class GenerousState(NodeState, frozen=True, kw_only=True, dict=True):
    """Hands out what is held."""

    @cached_property
    def ownership(self) -> Ownership:
        return GenerousOwnership(self.hardware, self.allocations, self.reported_health, self.ended)


class GenerousLedger(Ledger):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self.state = GenerousState(**msgspec.structs.asdict(self.state))


class WhimsicalOwnership(Ownership):
    """Goes by something that no fact tells."""

    whim = 0

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        return super().cpus_in_use | {self.whim}


class WhimsicalState(NodeState, frozen=True, kw_only=True, dict=True):
    """Every other state takes another CPU for held."""

    @property
    def ownership(self) -> Ownership:  # anew each time: it follows no former one
        found = WhimsicalOwnership(self.hardware, self.allocations, self.reported_health, self.ended)
        found.whim = self.seq % 2
        return found


class WhimsicalLedger(Ledger):
    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self.state = WhimsicalState(**msgspec.structs.asdict(self.state))


class ForgetfulLedger(Ledger):
    """Its snapshots lack the newest allocation."""

    def _snapshot(self) -> UnsequencedFact:
        older = tuple(self.state.allocations.values())[:-1]
        return partial(AllocationsSnapshot, allocations=older, memory={}, digest=self.state.digest)


class HastyLedger(Ledger):
    """The newest fact is published before those that wait."""

    def move(self, state: NodeState) -> None:
        self.pending.rotate(1)
        super().move(state)


class RepeatingLedger(Ledger):
    """What ended, ends twice."""

    def release(self, allocations: Sequence[AllocationID], reason: str) -> None:
        super().release(allocations, reason)
        self._record(*(partial(AllocationReleased, allocation=name, reason=reason) for name in allocations))


class CarelessLedger(Ledger):
    """Who asks is answered whether or not the disk has taken it."""

    def _write(self, events: Sequence[LedgerEvent], state: NodeState) -> None:
        with suppress(StateFault):
            super()._write(events, state)


class HoardingLedger(Ledger):
    """Its journal only ever grows."""

    def _compact_later(self) -> None:
        pass


class BelievingBus(FaultyBus):
    """Takes a message for stored whose id the store has for another one."""

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        try:
            return await super().publish(message, expected_last)
        except IdTaken:
            return await self.last_position(event_stores.store_of(message))


class OptimisticBus(FaultyBus):
    """Takes all that is under way for stored once the oldest of it is."""

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        positions = await super().publish_all(messages)
        return [positions[0] for _ in positions]


class SkippingBus(FaultyBus):
    """Publishes what is under way in another order."""

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        return [*reversed(await super().publish_all([*reversed(messages)]))]


class EntriesCount(LivenessCheck):
    """What the checkpoint has given to a pod is the pod's, whether or not that is gone."""

    def is_kept(self, allocation: Allocation, listing: KubeletListing) -> bool:
        return listing.checkpoint is None or not listing.checkpoint.isdisjoint(kubelet_places(allocation))

    def is_gone(self, allocation: Allocation, listing: KubeletListing) -> bool:
        return False


class NothingIsForgotten(LivenessCheck):
    """What the kubelet has in no file has ended."""

    def is_forgotten(self, allocation: Allocation, listing: KubeletListing, boot: str) -> bool:
        return False


class NobodyIsDisplaced(LivenessCheck):
    """Who has to make way has ended."""

    def is_displaced(self, allocation: Allocation, listing: KubeletListing) -> bool:
        return False


class ByEntriesDeviceAllocations(DeviceAllocations):
    liveness: type[LivenessCheck] = EntriesCount

    def __init__(self, *details: Any, **more: Any) -> None:
        super().__init__(*details, **more)
        self._reconciliation.liveness.__class__ = self.liveness


class ForgettingDeviceAllocations(ByEntriesDeviceAllocations):
    liveness = NothingIsForgotten


class SilentDeviceAllocations(ByEntriesDeviceAllocations):
    liveness = NobodyIsDisplaced


class BelievingDeviceAllocations(DeviceAllocations):
    """Prefers whatever the kubelet believes to be free."""

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        return prefer(self.state.hardware, resource, available, must_include, size, self._placement)


class Plant(NamedTuple):
    breaks: str
    """The invariant."""
    part: type[Ledger | DeviceAllocations | Admissions | FaultyBus | SocketlessLimiter | DirectoryCleanup | Instances]
    first: int = 0
    """The seed from which on it is looked for: what takes a rare chain of events is found sooner from here."""

    def parts(self) -> Parts:
        parts = Parts()
        for name in ("ledger", "device_allocations", "admissions", "bus", "limiter", "sweeps", "instances"):
            if issubclass(self.part, getattr(parts, name)):
                setattr(parts, name, self.part)
        return parts


PLANTS: dict[str, Plant] = {
    "pause-in-admissions": Plant("I1", PausingAdmissions, first=285),
    "pause-in-allocate": Plant("I1", PausingDeviceAllocations),
    "judges-a-group-at-once": Plant("I1", HastyDeviceAllocations, first=50),
    "grants-late": Plant("I13", PatientAdmissions, first=135),
    "half-a-release": Plant("I10", HalvingLedger),
    "anything-is-given": Plant("I2", TrustingDeviceAllocations),
    "held-and-free": Plant("I3", GenerousLedger),
    "forgetful-snapshots": Plant("I4", ForgetfulLedger),
    "newest-first": Plant("I5", HastyLedger),
    "ends-twice": Plant("I6", RepeatingLedger),
    "whims": Plant("I7", WhimsicalLedger, first=60),
    "no-remedy": Plant("I8", TerseDeviceAllocations),
    "answers-before-the-disk": Plant("I9", CarelessLedger, first=70),
    "never-compacts": Plant("I12", HoardingLedger, first=160),
    "believes-duplicates": Plant("I5", BelievingBus),
    "confirms-by-the-first": Plant("I5", OptimisticBus, first=120),
    "sends-backwards": Plant("I5", SkippingBus),
    "entries-count": Plant("I10", ByEntriesDeviceAllocations, first=50),
    "forgets-the-lost": Plant("C29", ForgettingDeviceAllocations, first=140),
    "displaces-silently": Plant("F21", SilentDeviceAllocations, first=450),
    "prefers-the-lost": Plant("F21", BelievingDeviceAllocations, first=1_130),
    "counts-no-slots": Plant("I14", LavishDeviceAllocations, first=70),
    "starts-everything": Plant("I14", HeedlessDeviceAllocations, first=270),
    "spreads-unasked": Plant("I14", SpreadingDeviceAllocations, first=30),
    "forgets-former-offers": Plant("I10", PresentLedger, first=70),
    "tells-another-gpu": Plant("I14", MisdirectingDeviceAllocations),
    "keeps-limits": Plant("F29", KeepingLimiter, first=845),
    "exaggerates-limits": Plant("F30", ExaggeratingDeviceAllocations, first=40),
    "mistakes-directories": Plant("F30", MistakingSweeps, first=115),
    "sweeps-nothing": Plant("I10", IdleSweeps, first=40),
    "leaks-instances": Plant("I10", LeakingInstances, first=50),
    "destroys-anothers-instance": Plant("F33", TidyingInstances, first=45),
    "destroys-what-is-granted": Plant("F33", HastyInstances, first=300),
}
