"""
A subscriber with guarantees: snapshot first, then events, each once, in order, without gaps.

The stream delivers each event at least once, and its store can be lost, or can have dropped old events. So every
allocation event is folded here for each node, with the same `NodeState` that the node itself uses. Repetitions are
dropped. For a gap, a snapshot is requested from the node's allocator, and the node's events are skipped until a
snapshot contains them. An event that cannot be decoded is counted and put on the dead-letter stream.

A stream whose positions go back was lost or rolled back. Its replacement is read as new; the fold drops repetitions.

A slow subscriber delays only itself. No call fails: if the bus refuses, the subscriber waits as for an unreachable bus,
and logs the refusal once.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote

import anyio
import msgspec
import structlog

from topoalign.client.healing import ASK_AGAIN_SECONDS, SNAPSHOT_SECONDS, Healer
from topoalign.client.node_folds import Counts, Delivery, Fold, current_snapshot, time_of
from topoalign.client.superseded import KeptNodes, Superseded, newest_snapshots
from topoalign.client.verifying import Unsettled, Verifier, listed_while_open, reading_kind
from topoalign.core import wire
from topoalign.core.model.errors import (
    BusRefused,
    BusUnavailable,
    Contradiction,
    TopoalignError,
    Unavailable,
    Undecodable,
    clean,
)
from topoalign.core.model.events import Reading, TopologyDiscovered, UsageObserved
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.ports import Bus, Clock, Message, Received, Stream
from topoalign.core.state.fold import newer_reading
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.runtime.settings import Access

MOST_WAITING = 1_000
"""Unread messages above which a subscriber that was up to date counts as slow; about 10,000 are read per second."""


LONGEST_HEADER = 300
"""Maximum number of characters of each header in a dead letter, so that it is not larger than a message can be."""

KNOWN_HEADERS = (
    "ce-id",
    "ce-type",
    "ce-source",
    "ce-time",
    "ce-specversion",
    "ce-datacontenttype",
    "traceparent",
)
"""The headers of events. Only these headers of a message are copied to its dead letter."""


def dead_letter(service: str, message: Message, error: TopoalignError, time: float) -> Message:
    """Builds a dead letter: a message that a consumer could not decode or apply, and the reason."""
    headers = {
        key: quote(message.headers[key][:LONGEST_HEADER], safe=f"{wire.PLAIN}%", errors="replace")  # escaped already
        for key in KNOWN_HEADERS
        if key in message.headers
    }
    return Message(
        subject=f"{wire.PREFIX}.deadletter.{wire.encode_node_token(service)}",
        headers={
            **headers,
            "topoalign-subject": quote(message.subject),
            "topoalign-reason": quote(clean(str(error), 300)),
            "topoalign-time": str(int(time)),
        },
        body=message.body[: wire.LARGEST_BODY],
    )


AT_ONCE = 256
AT_ONCE_BYTES = 4 * 2**20
"""Maximum number of past messages that are taken at once, and maximum bytes of their bodies."""
PAUSE = 0.2
"""Seconds between two attempts to read the end of a stream while the bus is unreachable."""
LONG_PAUSE = 5.0
"""Seconds between two attempts to read the end of a stream while the bus refuses it."""

log = structlog.get_logger("topoalign.client")


class Client:
    """Reads the streams over any bus. `connect` creates a client over NATS."""

    def __init__(
        self, bus: Bus, clock: Clock | None = None, name: str = "client", *, bodies: bool = True, usage: bool = True
    ) -> None:
        """
        The newest readings of all nodes are in memory. With `bodies` False, `Delivery.body` is empty, which saves 30 kB
        per node. With `usage` False, `UsageObserved` has only its node, epoch and revision, which saves up to 45 kB.
        """
        self.counts = Counts()
        self.unread: dict[Stream, int] = {}
        """Stream -> number of positions up to the end of its past; 0 if the past has been delivered completely."""
        self._bus = bus
        self._clock: Clock = clock or SystemClock()
        self._bodies = bodies
        self._usage = usage
        self.waiting: dict[Stream, int] = {}
        """Stream -> number of messages behind the last one that was read; it grows for a slow subscriber."""
        self._slow: set[Stream] = set()
        self._turns = TaskTurns(self._clock)
        self._shapes = Shapes()
        self._name = name
        self._healer = Healer(bus, self._clock)
        self._verifier = Verifier(bus, self._clock, self.counts, self._healer.heal)
        self.kept = KeptNodes(self._healer.forget, self._verifier.forget)

    @property
    def unsettled(self) -> Unsettled:
        """The nodes whose allocations are not certain now."""
        return self._verifier.unsettled

    def is_settled(self, node: NodeName) -> bool:
        """Whether the node's allocations are certain now."""
        return self._verifier.is_settled(node)

    async def verify(self, node: NodeName, within: float = SNAPSHOT_SECONDS) -> None:
        """
        Compares the view of a node in each running `allocations` and `nodes` with what its allocator confirms.

        If they differ, the node's services are asked to publish again. Then a snapshot with `Delivery.anew` replaces
        the received allocations, and topology and health are published under a new epoch. Raises Unavailable if the
        allocator does not answer.
        """
        await self._verifier.verify(node, within)
        self.kept.confirm(node)

    async def allocations(
        self, since: int | None = None, node: NodeName | None = None, *, superseded: bool = True
    ) -> AsyncGenerator[Delivery, None]:
        """
        Yields the allocation events of all nodes, or of one, without end.

        `since`: the position after which to begin. None: begins with one AllocationsSnapshot per node, which replaces
        all earlier events. If the stream no longer has the events after `since`, or ends before it, snapshots fill the
        gap. `superseded` False: leaves out past events that a later snapshot of their node replaces (module
        `superseded`). To leave the loop early, wrap this in `contextlib.aclosing`. Raises nothing: errors of the bus
        are logged, and the call is repeated.
        """
        subject = wire.allocation_subjects(node)
        newest = await self._find_end(Stream.ALLOCATIONS, subject)
        resumed = since is not None and since <= newest
        known_until = since if since is not None and resumed else newest
        passed_over = Superseded({})
        if not superseded:  # nothing is superseded if the newest snapshots are uncertain
            snapshots = wire.allocation_subjects(node, "snapshot")
            past = min(newest, await self._find_end(Stream.ALLOCATIONS, snapshots))
            async with self._bus.follow(Stream.ALLOCATIONS, snapshots) as messages:
                passed_over = Superseded(await newest_snapshots(messages, past, ASK_AGAIN_SECONDS, self._turns))
        fold = Fold(self.counts)
        position = passed_over.until
        announced = resumed
        async with (
            self._bus.follow(Stream.ALLOCATIONS, subject, position) as messages,
            listed_while_open(self._verifier.folds, fold),
        ):
            while True:
                if position >= newest:
                    if not announced:
                        announced = True
                        for snapshot in fold.snapshots():
                            await self._turns.give()
                            if snapshot.node in fold:  # otherwise it was forgotten in the meantime
                                yield current_snapshot(
                                    snapshot, fold.of(snapshot.node).state, newest, self._clock.wall()
                                )
                    await self._healer.heal(fold)
                self.unread[Stream.ALLOCATIONS] = max(0, newest - position)
                for received in await self._take_some(messages, position, newest, patient=not fold.broken):
                    end = await self._end_after(received, Stream.ALLOCATIONS, subject, position, newest)
                    if end is not None:
                        announced = announced and position >= known_until
                        newest = end
                        known_until = 0 if announced else end
                        passed_over = Superseded({})
                    if received is None:
                        continue
                    position = received.position
                    if passed_over.has(received):
                        continue
                    delivery = await self._decode(Stream.ALLOCATIONS, received)
                    if delivery is None or not await self._apply(fold, received, delivery) or position <= known_until:
                        continue
                    state = fold.of(delivery.event.node).state
                    yield msgspec.structs.replace(delivery, state=state, anew=fold.anew)

    async def nodes(self, node: NodeName | None = None) -> AsyncGenerator[Delivery, None]:
        """Yields topology, health and usage of all nodes or of one: the newest of each first, then each new one."""
        subject = f"{wire.PREFIX}.*.{'*' if node is None else wire.encode_node_token(node)}"
        newest = await self._find_end(Stream.NODES, subject)
        known: dict[tuple[NodeName, str], Delivery] = {}
        position = 0
        announced = False
        async with self._bus.follow(Stream.NODES, subject) as messages, listed_while_open(self._verifier.known, known):
            while True:
                if position >= newest and not announced:
                    announced = True
                    for old in sorted(known.values(), key=lambda delivery: delivery.position):
                        await self._turns.give()
                        yield old
                self.unread[Stream.NODES] = max(0, newest - position)
                for received in await self._take_some(messages, position, newest):
                    end = await self._end_after(received, Stream.NODES, subject, position, newest)
                    newest = newest if end is None else end
                    if received is None:
                        continue
                    position = received.position
                    delivery = await self._decode(Stream.NODES, received)
                    if delivery is None or not isinstance(delivery.event, Reading):
                        continue
                    key = (delivery.event.node, reading_kind(delivery.event))
                    had = known.get(key)
                    if (
                        had is not None
                        and isinstance(had.event, Reading)
                        and newer_reading(had.event, delivery.event) is had.event
                    ):
                        self.counts.repeated += 1
                        self._verifier.compare_revisions(had, delivery)
                        continue
                    known[key] = delivery
                    if announced:
                        yield delivery

    async def _find_end(self, stream: Stream, subject: str) -> int:
        """The position of the last past message; later messages are new. Waits for the bus."""
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
        """The new end of the past if the stream went back (a position came twice or the past is shorter); else None."""
        back = received is not None and received.position <= position
        if not back and (received is not None or position >= newest):
            return None
        end = await self._find_end(stream, subject)
        return end if back or end < newest else None

    async def _take_some(
        self, messages: AsyncIterator[Received], position: int, newest: int, *, patient: bool = True
    ) -> Sequence[Received | None]:
        """
        The next message after `position`, or several past messages. `[None]`: none came within ASK_AGAIN_SECONDS, so
        missing data is to be requested again. `patient`: waits without limit after the past has been read.
        """
        if patient and position >= newest:
            return [await anext(messages)]
        some: list[Received | None] = []
        size = 0
        with anyio.move_on_after(ASK_AGAIN_SECONDS):
            while len(some) < AT_ONCE and size < AT_ONCE_BYTES:
                received = await anext(messages)
                some.append(received)
                size += len(received.message.body)
                if received.position >= newest or received.position <= position:
                    break
                position = received.position
        return some or [None]

    async def _decode(self, stream: Stream, received: Received) -> Delivery | None:
        """Decodes a message; None for an event of a later version, and for one that cannot be decoded."""
        self._note_backlog(stream, received)
        await self._turns.give()
        try:
            event = wire.decode_event(received.message)
        except wire.UnknownEvent:
            self.counts.unknown += 1
            return None
        except Undecodable as error:
            await self._put_aside(stream, received, error)
            return None
        self.kept.note(event.node)
        if isinstance(event, TopologyDiscovered):
            event = msgspec.structs.replace(event, topology=self._shapes.interned(event.topology))
        if isinstance(event, UsageObserved) and not self._usage:
            event = msgspec.structs.replace(event, containers=(), containers_known=False, kubelet=None, exceeding=())
        body = received.message.body if self._bodies else b""
        return Delivery(event=event, position=received.position, time=time_of(received.message), body=body)

    async def _apply(self, fold: Fold, received: Received, delivery: Delivery) -> bool:
        try:
            return fold.apply(delivery.event)
        except Contradiction as error:
            await self._put_aside(Stream.ALLOCATIONS, received, error)
            return False

    def _note_backlog(self, stream: Stream, received: Received) -> None:
        """Logs once when a subscriber that was up to date has fallen behind, and once when it has caught up."""
        self.waiting[stream] = received.waiting
        if received.waiting > MOST_WAITING and not self.unread.get(stream) and stream not in self._slow:
            self._slow.add(stream)
            log.warning("slow subscriber: nothing is lost, all is late", stream=stream, waiting=received.waiting)
        elif not received.waiting and stream in self._slow:
            self._slow.discard(stream)
            log.info("subscriber has caught up", stream=stream, position=received.position)

    async def _put_aside(self, stream: Stream, received: Received, error: TopoalignError) -> None:
        """Counts a message that cannot be used, and puts it once on the dead-letter stream if the bus is available."""
        self.counts.undecodable += 1
        log.warning("message put aside", stream=stream, position=received.position, finding=error.finding)
        letter = dead_letter(self._name, received.message, error, self._clock.wall())
        name = f"deadletter.{wire.encode_node_token(self._name)}.{stream}.{received.position}"
        try:
            await self._bus.publish(msgspec.structs.replace(letter, headers={**letter.headers, "Nats-Msg-Id": name}))
        except Unavailable as unavailable:
            log.warning("dead letter not stored", finding=unavailable.finding, remedy=unavailable.remedy)


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
