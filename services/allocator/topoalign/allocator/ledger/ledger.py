"""
Keeps the allocations of this node. Only this module changes them.

Every change consists of the same steps without an await: facts are created, folded into the next state, appended to the
journal and synced. Only then do they take effect, and only then may a call be answered. Facts that the bus has not
received yet are in `pending`. After `compact_after` facts the journal is rewritten with the pending facts, followed by
a snapshot. If more than `pending_limit` facts are pending, they are dropped, and subscribers get the snapshot instead.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.journal_format import unpublished
from topoalign.core.model.allocations import OWNER_CHARACTERS
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import NotFound, StateFault, clean
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealthChanged,
    Displaced,
    KubeletObserved,
    LedgerEvent,
    MemoryExcess,
    Owner,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.ports import Clock, Journal, JournalEntry
from topoalign.core.state.fold import NodeState, replay
from topoalign.runtime.recent_dict import RecentDict

UnsequencedFact = Callable[..., LedgerEvent]
"""A fact without its position in the journal: called with `node`, `epoch` and `seq`, it returns the event."""


class Binding(NamedTuple):
    """Who holds an allocation, as in `AllocationBound`."""

    allocation: AllocationID
    owner: Owner
    pod_uid: str = ""
    displaced: tuple[Displaced, ...] = ()
    as_reserved: bool = False


class Observed(TypedDict, total=False):
    """New data for `UsageObserved`; fields that were not read are omitted."""

    containers: tuple[ContainerUsage, ...]
    kubelet: KubeletObserved
    exceeding: tuple[MemoryExcess, ...]


def observed(had: UsageObserved, seen: Observed, live: Container[AllocationID]) -> UsageObserved:
    """Returns the next revision, with the data in `seen`; returns `had` if nothing has changed."""
    now = msgspec.structs.replace(had, **seen, containers_known=had.containers_known or "containers" in seen)
    # If the allocations of a container have ended, its excess has also ended, even without a measurement.
    exceeding = tuple(each for each in now.exceeding if any(name in live for name in each.allocations))
    now = msgspec.structs.replace(now, exceeding=exceeding)
    return had if now == had else msgspec.structs.replace(now, revision=had.revision + 1)


PUBLISHED_SECONDS = 1.0
"""How long the last snapshot is reused for further snapshot requests, if nothing has changed."""

log = structlog.get_logger("topoalign.allocator.ledger.ledger")


class Ledger:
    """The allocations of one node. All changes are synchronous: there is no await between reading `state` and recording."""

    def __init__(
        self,
        node: NodeName,
        journal: Journal,
        clock: Clock,
        *,
        compact_after: int = 1_000,
        pending_limit: int = 10_000,
    ) -> None:
        self.node = node
        self.compact_after = compact_after
        self.pending_limit = pending_limit
        self.dropped = 0
        """Number of facts that a snapshot replaced because too many were pending."""
        self.faults = DiskFaults()
        self.release_log = ReleaseLog()
        """The releases since this process started."""
        self._journal = journal
        self._clock = clock
        self._changed = anyio.Event()
        self._announced: tuple[int, int, float] | None = None
        """(epoch, seq) of the newest snapshot, and its time in monotonic seconds."""
        self.version = 0
        entries = journal.load()
        events = [(event, entry.time) for entry in entries for event in entry.events]
        newest = max((at for at, (event, _) in enumerate(events) if isinstance(event, AllocationsSnapshot)), default=0)
        self.pending = deque(unpublished(events, journal.published(), newest))
        self.state = replay(node, (event for event, _ in events[newest:]))
        self._group: list[LedgerEvent] | None = None  # the facts of the current `transaction`
        self._facts = len(events)  # in the journal
        self._compact_at = self._facts + compact_after
        self._begin()

    def _begin(self) -> None:
        # Each start begins a new epoch, so that a journal restored from an old copy does not repeat numbers. After a
        # loss the last epoch is unknown. It may have begun in the same millisecond, or with the one fact by which the
        # published mark can lag. So the new epoch is greater than both.
        published, _ = self._journal.published() or (0, 0)
        lost = self.unconfirmed is not None
        now = int(self._clock.wall() * 1000)
        self._epoch = self._begun = max(now + lost, self.state.epoch + 1, published + 1 + lost)
        try:
            self.announce()
        except StateFault:
            if not self.state.epoch or self.unconfirmed is not None:
                raise  # subscribers may have received facts that are lost here
            # The journal could be read, so the node continues in its old epoch. Each new fact retries the write to
            # disk.
            self._epoch = self.state.epoch

    @property
    def unconfirmed(self) -> str | None:
        """Why allocations may be missing from `state`; None: the record is complete."""
        return self._journal.unconfirmed

    @property
    def clock(self) -> Clock:
        """The clock that sets the times of the facts."""
        return self._clock

    @property
    def boot(self) -> str:
        """The boot id of the node from discovery; empty: unknown."""
        return self.state.topology.boot_id if self.state.topology is not None else ""

    @property
    def machine(self) -> str:
        """The described machine that the node simulates; empty: real hardware, or unknown."""
        return self.state.topology.machine if self.state.topology is not None else ""

    def take_reading(self, event: TopologyDiscovered | DeviceHealthChanged | UsageObserved) -> None:
        """Applies a reading of hardware, health or usage. Not journaled, because it is read again after every start."""
        had = self.state
        state = self.state.apply(event)
        if state.topology is not had.topology or state.health is not had.health or state.usage is not had.usage:
            self.move(state)

    def observe(self, **seen: Unpack[Observed]) -> None:
        """Updates `UsageObserved` if this data has changed."""
        had = self.state.usage
        if had is None:  # no reading yet
            had = UsageObserved(node=self.node, epoch=self._begun, revision=0, containers=(), containers_known=False)
        if (now := observed(had, seen, self.state.allocations)) != had:
            self.take_reading(now)

    def confirm(self, by: str) -> None:
        """Confirms that the record is complete. `by`: who confirms it, for the log. Raises StateFault."""
        unconfirmed = self.unconfirmed
        if unconfirmed is None:
            return
        with self.faults.noted():
            self._journal.trust()
        log.info("the record is confirmed", by=by, reason=unconfirmed, allocations=len(self.state.allocations))
        self.move(self.state)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Records all facts of this block in one entry. The block must not await. Raises StateFault when it ends."""
        assert self._group is None, "one group at a time"
        before = self.state
        self._group = []  # inside the block `state` already includes the facts
        try:
            yield
        finally:
            events = self._group
            state = self.state
            self._group = None
            self.state = before
        if events:
            self._write(events, state)

    def next_id(self, ahead: int = 0) -> AllocationID:
        """Returns the id of the next grant, or of the grant `ahead` grants after it."""
        return AllocationID(f"{self._epoch:x}-{self.state.seq + 1 + ahead}")

    def named(self, allocation: Allocation, ahead: int = 0) -> Allocation:
        """Returns a copy of the allocation with the next id and the current boot and machine."""
        return msgspec.structs.replace(allocation, id=self.next_id(ahead), boot=self.boot, machine=self.machine)

    def grant(
        self,
        allocations: Sequence[Allocation],
        *,
        instead_of: Sequence[AllocationID] = (),
        reasons: Mapping[AllocationID, str] = {},
        preferred: Mapping[AllocationID, Sequence[DeviceID]] = {},
    ) -> None:
        """
        Records allocations in one journal entry. The same entry releases the allocations that they replace
        (`instead_of`), with the reason `superseded` unless `reasons` has another. It also records the `preferred`
        devices if the kubelet chose other ones. Raises StateFault.
        """
        gone = [
            partial(AllocationReleased, allocation=name, reason=reasons.get(name, "superseded")) for name in instead_of
        ]
        granted = [partial(AllocationGranted, allocation=allocation) for allocation in allocations]
        deviated = [
            partial(
                AllocationDeviated,
                allocation=each.id,
                preferred=tuple(preferred[each.id]),
                allocated=tuple(device for devices in each.devices.values() for device in devices),
            )
            for each in allocations
            if each.id in preferred
        ]
        self._record(*gone, *granted, *deviated)

    def bind(self, bindings: Sequence[Binding]) -> None:
        """Records who holds these allocations, in this boot of the node. Raises StateFault."""
        self._record(*(partial(AllocationBound, boot=self.boot, **each._asdict()) for each in bindings))

    def release(self, allocations: Sequence[AllocationID], reason: str) -> None:
        """Releases these allocations. If one is not live, this raises NotFound and releases none."""
        for name in allocations:
            if name not in self.state.allocations:
                raise NotFound("live allocation", name, "it may be released already: see `topoalign watch --since 1`")
        self._record(*(partial(AllocationReleased, allocation=name, reason=reason) for name in allocations))

    def refuse(self, pod: PodRequest, refusal: Refusal) -> None:
        """Records that a pod was refused, and why. Raises StateFault."""
        fact = partial(
            AllocationRefused,
            namespace=pod.namespace,
            pod=pod.name,
            container=refusal.container,
            reason=refusal.reason,
            code=refusal.code,
            finding=refusal.finding,
            remedy=refusal.remedy,
        )
        self._record(fact)

    def announce(self) -> tuple[int, int]:
        """Records a snapshot, compacts the journal, and returns the snapshot's (epoch, seq). Raises StateFault."""
        # Many subscribers can request a snapshot after a bus outage, so an unchanged one is repeated only after
        # `PUBLISHED_SECONDS`.
        just_now = self._clock.monotonic() - PUBLISHED_SECONDS
        newest = self.state.epoch, self.state.seq
        if self._announced is None or self._announced[:2] != newest or self._announced[2] <= just_now:
            self._record(self._snapshot())
            self._announced = (self.state.epoch, self.state.seq, self._clock.monotonic())
            self._compact()
        return self.state.epoch, self.state.seq

    def published(self, events: Sequence[LedgerEvent]) -> None:
        """Removes these facts, which the bus has, from the front of `pending`."""
        known = [event for event in events if self.pending and self.pending[0][0] is event and self.pending.popleft()]
        if known:
            self._journal.mark_published(known[-1].epoch, known[-1].seq)

    async def wait_past(self, version: int) -> None:
        """Waits until `version` is greater than this one."""
        while self.version <= version:
            await self._changed.wait()

    def _snapshot(self) -> UnsequencedFact:
        live = tuple(self.state.allocations.values())
        return partial(AllocationsSnapshot, allocations=live, memory=dict(self.state.memory), digest=self.state.digest)

    def _record(self, *facts: UnsequencedFact) -> None:
        """Records facts on disk, then in the state. If this raises StateFault, nothing has changed."""
        events: list[LedgerEvent] = []
        state = self.state
        for fact in facts:
            seq = state.seq + 1 if state.epoch == self._epoch else 1
            events.append(fact(node=self.node, epoch=self._epoch, seq=seq))
            state = state.apply(events[-1])
        if self._group is not None:
            self._group += events
            self.state = state
        elif events:
            self._write(events, state)

    def _write(self, events: Sequence[LedgerEvent], state: NodeState) -> None:
        entry = JournalEntry(time=self._clock.wall(), events=tuple(events))
        with self.faults.noted():
            self._journal.append(entry)
        self._facts += len(events)
        self.release_log.note(self.state.allocations, events)
        self.pending.extend((event, entry.time) for event in events)
        self.move(state)
        if self._facts >= self._compact_at and not isinstance(events[-1], AllocationsSnapshot):
            self._compact_later()

    def _compact_later(self) -> None:
        try:
            self.announce()
        except StateFault:
            self._compact_at = self._facts + self.compact_after

    def _compact(self) -> None:
        if len(self.pending) > self.pending_limit:
            self.dropped += len(self.pending) - 1
            self.pending = deque([self.pending[-1]])
        with self.faults.noted():
            self._journal.rewrite([JournalEntry(time=time, events=(event,)) for event, time in self.pending])
        self._facts = len(self.pending)
        self._compact_at = self._facts + self.compact_after

    def move(self, state: NodeState) -> None:
        """Sets the state and wakes all waiting tasks. Also called if only derived data has changed."""
        self.state = state
        self.version += 1
        self._changed.set()
        self._changed = anyio.Event()


class DiskFaults:
    """Records failed journal writes for /readyz, and logs when failures begin and end."""

    def __init__(self) -> None:
        self.newest: str | None = None
        """The last failure and its remedy; None after a successful write."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records whether the writes in this block raise StateFault."""
        try:
            yield
        except StateFault as fault:
            if self.newest is None:
                log.error("the journal cannot be written", finding=fault.finding, remedy=fault.remedy)
            self.newest = f"{fault.finding}; {fault.remedy}"
            raise
        if self.newest is not None:
            log.info("the journal can be written again")
        self.newest = None


# The state contains only live allocations, so releases are recorded separately for `explain`.


REMEMBERED = 1_000
"""Maximum number of recorded releases."""
MOST_EXPLAINED = 3
"""Maximum number of ended allocations that `explain` returns."""

REASONS = {
    "released": "it was released on request",
    "gone": "its container ended",
    "orphan": "its container ended while the allocator did not run",
    "superseded": "the kubelet allocated its devices again",
    "displaced": "the kubelet allocated its devices to another container although its own was not seen to end",
}


class ReleaseLog:
    """Records how the last `REMEMBERED` released allocations ended, for `explain`. Kept only in memory."""

    def __init__(self) -> None:
        self._ended = RecentDict[AllocationID, tuple[set[str], str]](REMEMBERED)
        """Allocation -> the names by which `explain` finds it (its id, and `namespace/pod`), and how it ended."""
        self.origins = RecentDict[AllocationID, AllocationID](REMEMBERED)
        """Remainder -> the partly released allocation that it belonged to, which can itself be a remainder."""

    def note(self, live: Mapping[AllocationID, Allocation], events: Sequence[LedgerEvent]) -> None:
        """Records the allocations in `live` that these facts release. The facts are those of one journal entry."""
        granted = [event.allocation for event in events if isinstance(event, AllocationGranted)]
        for event in events:
            if isinstance(event, AllocationReleased) and (gone := live.get(event.allocation)) is not None:
                names: set[str] = (
                    {gone.id} if gone.owner is None else {gone.id, f"{gone.owner.namespace}/{gone.owner.pod}"}
                )
                devices = ", ".join(sorted(gone.device_ids))
                uid = f", pod UID {gone.pod_uid}" if gone.pod_uid else ""
                ended = (
                    f"{container_title(gone.owner)} had {devices} (allocation {gone.id}{uid}), and no longer holds it: "
                )
                ended += REASONS.get(event.reason, event.reason)
                successors = [new.id for new in granted if not new.device_ids.isdisjoint(gone.device_ids)]
                if successors:
                    ended += f" (allocation {', '.join(successors)})"
                self._ended[gone.id] = names, clean(ended, 500)

    def explain(self, target: str) -> tuple[str, ...]:
        """Returns a sentence for each ended allocation of this id, or of a pod of this name; newest first."""
        found = [ended for names, ended in reversed(self._ended.values()) if target in names]
        return tuple(found[:MOST_EXPLAINED])


def container_title(owner: Owner | None) -> str:
    """Returns the name of a container for logs, readiness and explanations: `NAMESPACE/POD CONTAINER`."""
    if owner is None:
        return "an unknown container"
    return clean(f"{owner.namespace}/{owner.pod} {owner.container}", OWNER_CHARACTERS)
