"""
The allocations of this node, and the only place that changes them.

Every change goes the same way and without a pause: the facts are drafted, folded into the next state, appended to the
journal and synced; only then do they count, and only then may anybody be answered. So after a crash at any point the
ledger is as it was before the change or as it was after. What the bus has not heard yet waits in `pending`, in order.

The journal is kept short: after `compact_after` entries it is written anew as one snapshot of what is live, preceded by
nothing but the facts that are still to be published. Should those become more than `pending_limit` because the bus has
been away for long, they are dropped in favour of the snapshot, which makes every listener whole again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import anyio

from topoalign.core.decisions import Refusal
from topoalign.core.errors import NotFound, StateFault
from topoalign.core.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealthChanged,
    LedgerEvent,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.ids import AllocationID, DeviceID, NodeName
from topoalign.core.ports import Clock, Entry, Journal
from topoalign.core.requests import PodRequest
from topoalign.core.state import NodeState, replay


class Draft(Protocol):
    """A fact that lacks only its place in the journal."""

    def __call__(self, *, node: NodeName, epoch: int, seq: int) -> LedgerEvent: ...


class Ledger:
    """One node's allocations. Synchronous throughout: between looking at `state` and recording there is no pause."""

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
        """Facts that were never published because too many were waiting; a snapshot stands in for them."""
        self._journal = journal
        self._clock = clock
        self._changed = anyio.Event()
        self.version = 0
        entries = journal.load()
        events = [event for entry in entries for event in entry.events]
        epoch, seq = journal.published()
        self.pending: deque[tuple[LedgerEvent, float]] = deque(
            (event, entry.time)
            for entry in entries
            for event in entry.events
            if event.epoch != epoch or event.seq > seq
        )
        newest = max((at for at, event in enumerate(events) if isinstance(event, AllocationsSnapshot)), default=0)
        self.state = replay(node, events[newest:])
        self._entries = len(entries)
        self._compact_at = self._entries + compact_after
        self._epoch = self.state.epoch or int(clock.wall() * 1000)
        self.announce()

    def hear(self, event: TopologyDiscovered | DeviceHealthChanged) -> None:
        """Takes in what discovery said. Not journaled: discovery says it again."""
        state = self.state.apply(event)
        if state.topology is not self.state.topology or state.health is not self.state.health:
            self._move(state)

    def next_id(self, ahead: int = 0) -> AllocationID:
        """A name that no allocation of this node had before: the journal's epoch and the place the grant will have."""
        return AllocationID(f"{self._epoch:x}-{self.state.seq + 1 + ahead}")

    def grant(
        self,
        allocations: Sequence[Allocation],
        *,
        instead_of: Sequence[AllocationID] = (),
        preferred: Mapping[AllocationID, Sequence[DeviceID]] = {},
    ) -> None:
        """
        Records allocations, all or none; with them the release of those whose place they take, and for each one that
        the kubelet chose otherwise than was preferred, what was preferred.
        """
        gone = [partial(AllocationReleased, allocation=name, reason="superseded") for name in instead_of]
        granted = [partial(AllocationGranted, allocation=allocation) for allocation in allocations]
        deviated = [
            partial(
                AllocationDeviated,
                allocation=allocation.id,
                preferred=tuple(preferred[allocation.id]),
                allocated=tuple(device for devices in allocation.devices.values() for device in devices),
            )
            for allocation in allocations
            if allocation.id in preferred
        ]
        self._record(*gone, *granted, *deviated)

    def bind(self, owners: Sequence[tuple[AllocationID, Owner]]) -> None:
        """Records who holds these allocations."""
        self._record(*(partial(AllocationBound, allocation=name, owner=owner) for name, owner in owners))

    def release(self, allocations: Sequence[AllocationID], reason: str) -> None:
        """Records that these allocations have ended. Raises NotFound if one is not live; then none is released."""
        for name in allocations:
            if name not in self.state.allocations:
                raise NotFound("live allocation", name, "it may be released already: see `topoalign watch --since 1`")
        self._record(*(partial(AllocationReleased, allocation=name, reason=reason) for name in allocations))

    def refuse(self, pod: PodRequest, refusal: Refusal) -> None:
        """Records that a pod was refused."""
        self._record(
            partial(
                AllocationRefused,
                namespace=pod.namespace,
                pod=pod.name,
                container=refusal.container,
                reason=refusal.reason,
                code=refusal.code,
                finding=refusal.finding,
                remedy=refusal.remedy,
            )
        )

    def announce(self) -> tuple[int, int]:
        """Says all live allocations anew, shortens the journal to that, and returns the snapshot's (epoch, seq)."""
        self._record(self._snapshot())
        self._compact()
        return self.state.epoch, self.state.seq

    def published(self, event: LedgerEvent) -> None:
        """The bus has this fact, the oldest of `pending`."""
        if self.pending and self.pending[0][0] is event:
            self.pending.popleft()
            self._journal.mark_published(event.epoch, event.seq)

    async def beyond(self, version: int) -> None:
        """Waits until `version` is greater than this one."""
        while self.version <= version:
            await self._changed.wait()

    def _snapshot(self) -> Draft:
        return partial(
            AllocationsSnapshot,
            allocations=tuple(self.state.allocations.values()),
            memory=dict(self.state.memory),
            digest=self.state.digest,
        )

    def _record(self, *drafts: Draft) -> None:
        """Drafts become facts: on disk first, then in the state. Raises StateFault, and then nothing has changed."""
        if not drafts:
            return
        events: list[LedgerEvent] = []
        state = self.state
        for draft in drafts:
            events.append(draft(node=self.node, epoch=self._epoch, seq=state.seq + 1))
            state = state.apply(events[-1])
        entry = Entry(time=self._clock.wall(), events=tuple(events))
        self._journal.append(entry)
        self._entries += 1
        self.pending.extend((event, entry.time) for event in events)
        self._move(state)
        if self._entries >= self._compact_at and not isinstance(events[-1], AllocationsSnapshot):
            self._compact_later()

    def _compact_later(self) -> None:
        """Compacts if the disk allows. What was recorded stands either way, so a failure here only postpones."""
        try:
            self.announce()
        except StateFault:
            self._compact_at = self._entries + self.compact_after

    def _compact(self) -> None:
        """The journal becomes what is still to be published, and the snapshot that was said last."""
        if len(self.pending) > self.pending_limit:
            self.dropped += len(self.pending) - 1
            self.pending = deque([self.pending[-1]])
        self._journal.rewrite([Entry(time=time, events=(event,)) for event, time in self.pending])
        self._entries = len(self.pending)
        self._compact_at = self._entries + self.compact_after

    def _move(self, state: NodeState) -> None:
        self.state = state
        self.version += 1
        self._changed.set()
        self._changed = anyio.Event()
