"""
A subscriber with guarantees: snapshot first, then events, each once, in order, without gaps.

The stream delivers at least once, and an outbox may repeat an event long after the broker has forgotten its id; a store
may be lost, or too short. So every allocation event is folded here, per node, with the same `NodeState`
that the node itself uses: repetitions are dropped, and if the fold finds a gap, it requests a snapshot from the node's
allocator, and the node's events wait for it. An event that cannot be decoded is counted and put on the
dead-letter stream, and the subscriber continues.

A stream whose positions go back was lost or rolled back. All events of its replacement are read as new, and the fold
drops repetitions as usual.

Nothing here acknowledges or blocks anything: a slow subscriber delays only itself. No call gives up: if the bus
refuses, the subscriber waits as for a bus that is away, and logs the refusal once.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import structlog

from topoalign.client.fold import Counts, Fold
from topoalign.client.heard import Heard, made_up, time_of
from topoalign.client.verifying import Verifier, kind_of
from topoalign.core import wire
from topoalign.core.model.errors import (
    BadRequest,
    BusRefused,
    BusUnavailable,
    Contradiction,
    NoFit,
    TopoalignError,
    Unavailable,
    Undecodable,
)
from topoalign.core.model.events import Reading, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import SnapshotRequest
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.ports import Bus, Clock, Received, Stream
from topoalign.core.state.fold import newer
from topoalign.runtime.backoff import backoff_seconds
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import Access, connect_bus

SNAPSHOT_SECONDS = 1.0
"""For an allocator to announce itself anew. One that is down is known at once; only one that hangs takes this long."""
ASK_AGAIN_SECONDS = 6.0
"""Until what did not come is asked for again: a snapshot, or the end of a stream. Longer than a follower bears silence."""
LONGEST_ASK_AGAIN_SECONDS = 600.0
"""
A snapshot that comes and is of no use is asked for ever more rarely, at last so often: an allocator of another version
writes its journal anew for each.
"""
MOST_ASKS = 10
"""So often an allocator is asked for a snapshot within ASK_AGAIN_SECONDS, however many forged facts make gaps meanwhile."""
MOST_WAITING = 1_000
"""Messages behind which a subscriber that was up to date is told that it is slow: some ten thousand are read in a second."""
PAUSE, LONG_PAUSE = 0.2, 5.0
"""Seconds between two tries to learn where a stream ends, from a bus that is away and from one that refuses."""

log = structlog.get_logger("topoalign.client")


class Client:
    """Reads the streams over any bus. `connect` makes one over NATS."""

    def __init__(self, bus: Bus, clock: Clock | None = None, name: str = "client", *, bodies: bool = True) -> None:
        """`bodies` False leaves `Heard.body` empty: the newest readings of many nodes are held, 30 kB each."""
        self.counts = Counts()
        self.unread: dict[Stream, int] = {}
        """Of each stream that is followed: how far away the end of its past still is; 0 once all of it was handed over."""
        self.waiting: dict[Stream, int] = {}
        """Messages of each stream that waited behind the last one read: what a slow subscriber has to catch up with."""
        self._slow: set[Stream] = set()
        self._bus = bus
        self._clock: Clock = clock or SystemClock()
        self._name, self._bodies = name, bodies
        self._asked: dict[NodeName, tuple[float, int]] = {}
        """Node -> since when its asks are counted, and how often it was asked for a snapshot since."""
        self._shapes = Shapes()
        self._verifier = Verifier(bus, self._clock, self.counts, self._heal)

    async def verify(self, node: NodeName, within: float = SNAPSHOT_SECONDS) -> None:
        """
        Compares what is believed of a node, by each `allocations` and `nodes` that is iterated over, with what its allocator
        stands by. Where they differ, the node's services are asked to say it anew: then `Heard.anew` of a snapshot tells
        that it replaces what was heard, and topology and health come under a new epoch. Raises Unavailable if the allocator
        does not answer.
        """
        await self._verifier.verify(node, within)

    async def allocations(self, since: int | None = None, node: NodeName | None = None) -> AsyncGenerator[Heard, None]:
        """
        Allocation events of all nodes, or of one, for ever.

        `since` None begins with one AllocationsSnapshot per node that stands for all before it. Else the events after
        that position follow; where the stream does not reach back, or does not reach that far, snapshots fill the gap.
        To leave the loop early, wrap this in `contextlib.aclosing`. Raises nothing: whatever the bus has against it is
        logged and tried again.
        """
        subject = wire.allocation_subjects(node)
        newest = await self._newest(Stream.ALLOCATIONS, subject)
        resumed = since is not None and since <= newest
        known_until = since if since is not None and resumed else newest
        fold = Fold(self.counts)
        position, announced = 0, resumed
        async with self._bus.follow(Stream.ALLOCATIONS, subject) as messages, self._verifier.of_fold(fold):
            while True:
                if position >= newest:
                    if not announced:
                        announced = True
                        for snapshot in fold.snapshots():
                            yield made_up(snapshot, newest, self._clock.wall())
                    await self._heal(fold)
                self.unread[Stream.ALLOCATIONS] = max(0, newest - position)
                received = await self._next(messages, patient=position >= newest and not fold.broken)
                end = await self._end_after(received, Stream.ALLOCATIONS, subject, position, newest)
                if end is not None:
                    announced = announced and position >= known_until
                    newest, known_until = end, 0 if announced else end
                if received is None:
                    continue
                position = received.position
                heard = await self._heard(Stream.ALLOCATIONS, received)
                if heard is not None and await self._news(fold, received, heard) and position > known_until:
                    yield msgspec.structs.replace(heard, anew=True) if fold.anew else heard

    async def nodes(self, node: NodeName | None = None) -> AsyncGenerator[Heard, None]:
        """Topology, health and usage as announced, of all nodes or of one: the newest of each first, then all news."""
        subject = f"{wire.PREFIX}.*.{'*' if node is None else wire.token(node)}"
        newest = await self._newest(Stream.NODES, subject)
        known: dict[tuple[NodeName, str], Heard] = {}
        position, announced = 0, False
        async with self._bus.follow(Stream.NODES, subject) as messages, self._verifier.of_readings(known):
            while True:
                if position >= newest and not announced:
                    announced = True
                    for old in sorted(known.values(), key=lambda heard: heard.position):
                        yield old
                self.unread[Stream.NODES] = max(0, newest - position)
                received = await self._next(messages, patient=position >= newest)
                end = await self._end_after(received, Stream.NODES, subject, position, newest)
                newest = newest if end is None else end
                if received is None:
                    continue
                position = received.position
                heard = await self._heard(Stream.NODES, received)
                if heard is None or not isinstance(heard.event, Reading):
                    continue
                key = (heard.event.node, kind_of(heard.event))
                had = known[key].event if key in known else None
                if isinstance(had, Reading) and newer(had, heard.event) is had:
                    self.counts.repeated += 1
                    self._verifier.look_twice(had, heard.event)
                    continue
                known[key] = heard
                if announced:
                    yield heard

    async def _newest(self, stream: Stream, subject: str) -> int:
        """Where the past ends: what comes later is news. Waits for the bus."""
        refusal = ""
        while True:
            try:
                return await self._bus.last_position(stream, subject)
            except BusUnavailable as error:
                log.debug("waiting for the bus", stream=stream, finding=error.finding)
                await self._clock.sleep(PAUSE)
            except BusRefused as error:
                if error.finding != refusal:
                    refusal = error.finding
                    log.warning("bus refuses", stream=stream, finding=error.finding, remedy=error.remedy)
                await self._clock.sleep(LONG_PAUSE)

    async def _end_after(
        self, received: Received | None, stream: Stream, subject: str, position: int, newest: int
    ) -> int | None:
        """
        Where the past ends now, if the stream went back after `position`, else None.

        Seen by a position that was there before, or by a past that does not come and is shorter than it was.
        """
        back = received is not None and received.position <= position
        if not back and (received is not None or position >= newest):
            return None
        end = await self._newest(stream, subject)
        return end if back or end < newest else None

    async def _next(self, messages: AsyncIterator[Received], *, patient: bool) -> Received | None:
        """The next message, or None when it is time to ask again for what did not come."""
        if patient:
            return await anext(messages)
        with anyio.move_on_after(ASK_AGAIN_SECONDS):
            return await anext(messages)
        return None

    def _note_pace(self, stream: Stream, received: Received) -> None:
        """Says once when a subscriber that was up to date has fallen behind, and once when it has caught up."""
        self.waiting[stream] = received.waiting
        if received.waiting > MOST_WAITING and not self.unread.get(stream) and stream not in self._slow:
            self._slow.add(stream)
            log.warning("slow subscriber: nothing is lost, all is late", stream=stream, waiting=received.waiting)
        elif not received.waiting and stream in self._slow:
            self._slow.discard(stream)
            log.info("subscriber has caught up", stream=stream, position=received.position)

    async def _heard(self, stream: Stream, received: Received) -> Heard | None:
        """What a message says, if it says something to this version."""
        self._note_pace(stream, received)
        try:
            event = wire.decode(received.message)
        except wire.UnknownEvent:
            self.counts.unknown += 1
            return None
        except Undecodable as error:
            await self._put_aside(stream, received, error)
            return None
        if isinstance(event, TopologyDiscovered):
            event = msgspec.structs.replace(event, topology=self._shapes.interned(event.topology))
        body = received.message.body if self._bodies else b""
        return Heard(event=event, position=received.position, time=time_of(received.message), body=body)

    async def _news(self, fold: Fold, received: Received, heard: Heard) -> bool:
        try:
            return fold.apply(heard.event)
        except Contradiction as error:
            await self._put_aside(Stream.ALLOCATIONS, received, error)
            return False

    async def _put_aside(self, stream: Stream, received: Received, error: TopoalignError) -> None:
        self.counts.undecodable += 1
        log.warning("message put aside", stream=stream, position=received.position, finding=error.finding)
        letter = wire.dead_letter(self._name, received.message, error, self._clock.wall())
        name = f"deadletter.{wire.token(self._name)}.{stream}.{received.position}"
        try:
            await self._bus.publish(msgspec.structs.replace(letter, headers={**letter.headers, "Nats-Msg-Id": name}))
        except Unavailable as unavailable:
            log.warning("dead letter not stored", finding=unavailable.finding, remedy=unavailable.remedy)

    async def _heal(self, fold: Fold) -> None:
        """Asks the allocators of nodes with missing events for a snapshot; it comes over the stream."""
        now = self._clock.monotonic()
        due = [
            node
            for node, asked in fold.broken.items()
            if asked is None or now >= asked + patience(fold.answered.get(node, 0))
        ]
        async with anyio.create_task_group() as tasks:
            for node in due:
                tasks.start_soon(self._ask, fold, node)

    async def _ask(self, fold: Fold, node: NodeName) -> None:
        """Once, unless the node's allocator was asked too often of late: then when it is looked at again."""
        now = self._clock.monotonic()
        since, times = self._asked.get(node, (now, 0))
        since, times = (since, times) if now < since + ASK_AGAIN_SECONDS else (now, 0)
        if times >= MOST_ASKS:
            return
        self._asked[node] = since, times + 1
        fold.broken[node] = now
        question = msgspec.json.encode(SnapshotRequest(node=node))
        try:
            answer = await self._bus.ask(wire.admission_subject(node, "snapshot"), question, SNAPSHOT_SECONDS)
            fold.answered[node] = fold.answered.get(node, 0) + 1
            fold.promise(node, *wire.answered(answer, tuple[int, int]))
        except (Unavailable, BadRequest, NoFit) as error:
            if node not in fold.silent:  # it may be gone for good, and its last events be there for a month
                log.info("no snapshot yet", node=node, finding=error.finding)
            fold.silent.add(node)


def patience(answered: int) -> float:
    """Seconds until a snapshot is asked for again, after so many that were promised and did not make the node whole."""
    return backoff_seconds(answered + 1, ASK_AGAIN_SECONDS, LONGEST_ASK_AGAIN_SECONDS)


@asynccontextmanager
async def connect(
    url: str,
    *,
    name: str = "subscriber",
    wait: float | None = 10.0,
    access: Access = Access(),  # noqa: B008  # frozen
) -> AsyncIterator[Client]:
    """A client over NATS while the context is open. Raises what `topoalign.runtime.nats_bus.connect_bus` does."""
    async with connect_bus(url, name=name, wait=wait, access=access) as bus:
        yield Client(bus, name=name)
