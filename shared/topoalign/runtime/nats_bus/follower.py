"""
Follows a stream: messages in order, each at least once, through any number of lost connections.

Nothing is created on the server for a follower, because a client with the permission to create consumers can publish on
every subject. The follower reads messages directly from the store, in batches. After the last message it subscribes to
news: NATS republishes each message that it has stored, with its position (`event_stores.NEWS`). If the news is
certainly the next message, it is used directly. Otherwise the message is read from the store. News can be lost, so a
follower also checks the store every few seconds. A follower that falls behind ends its subscription to news; otherwise
it would receive every message twice, as news and from the store.

The next batch is requested as soon as the last one has arrived, so that server and reader work at the same time. But at
most two batches wait for the reader, so that a slow reader does not burden the server.

A refusal is treated like a lost connection, because operators change permissions at run time. It is logged once.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import msgspec
import structlog
from nats.aio.subscription import Subscription

from topoalign.core.model.errors import BusRefused, BusUnavailable, clean
from topoalign.core.ports import Received, Stream
from topoalign.core.wire import PREFIX
from topoalign.runtime.clock import backoff_seconds, until_tick
from topoalign.runtime.event_stores import NEWS, has_only
from topoalign.runtime.nats_bus.delivered import Delivered, InStore
from topoalign.runtime.nats_bus.nats_connection import NatsConnection
from topoalign.runtime.nats_bus.nats_library import CLOCK
from topoalign.runtime.nats_bus.stored import find_message, nobody_reads, source_of

BATCH = 128
LARGEST_BATCH = 1000
"""Messages per read: at least `BATCH`, up to `LARGEST_BATCH` if more are waiting, because each read costs a round trip."""
BATCH_BYTES = 4 * 1024 * 1024
NEWS_BYTES = 4 * 1024 * 1024
"""
Maximum bytes of news that wait for the reader. Above this, it is dropped, its subscription ends, and the store is read.
"""
LOOK = 4.0
"""Seconds after which a follower without news checks the store."""
SILENCE = 5.0
"""Seconds without a message after which the current batch is assumed to be lost."""
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 2.0
REFUSED_PAUSE = 5.0
"""Pauses in seconds between attempts: the first, the longest after a loss, and the longest after a refusal."""
MOST_TRIES = 8
"""Number of reads (within a second or two) that may miss an announced message before it counts as deleted."""
END_OF_BATCH = "204"
NO_MESSAGE = "404"
NO_RESPONDERS = "503"

log = structlog.get_logger("topoalign.runtime.nats")


class FollowerReading:
    """Reads the messages of a follower on one connection."""

    def __init__(
        self, connection: NatsConnection, stream: Stream, subject: str, position: int, stored: bytes = b""
    ) -> None:
        self.connection = connection
        self.stored = stored
        """When the message at the position was stored, by the clock of the store; empty: unknown."""
        self._stream = stream
        self._stream_name = stream.encode()
        self._subject = subject
        self._position = position
        self._source = source_of(stream)
        self._news_subject = subject.replace(PREFIX, NEWS, 1) if subject.startswith(f"{PREFIX}.") else f"{NEWS}.>"
        self._filter = {} if has_only(stream, subject) else {"next_by_subj": subject}
        """Empty for a whole stream: without a filter, reading it costs nats-server 2.15.1 a third less."""
        self._is_one_subject = not {"*", ">"} & {*subject.split(".")}
        self._inbox = connection.client.new_inbox()
        self._answers: Subscription | None = None
        self._announcements: Subscription | None = None
        """The subscription to news. None while the follower is behind."""
        self._arrived: deque[Delivered] = deque()
        self._change = anyio.Event()
        self._batch = 0
        """The number of the batch that is read, or of the last one."""
        self._reply = b""
        """The suffix of the reply subject of this batch."""
        self._requested = 0
        """The number of the batch that was requested last: `_batch`, or the one after it."""
        self._reading = False
        """Whether the batch has not ended yet."""
        self._beyond = (0, 0)
        """Messages after the batch that arrived last, and its last position; zeros once the next is requested."""
        self._before = 0
        """The position of the last received message of the batch; 0: none was received."""
        self._waiting = 0
        """Number of messages after the last one that was read."""
        self._news: deque[tuple[InStore, Delivered]] = deque()
        self._news_bytes = 0
        self._is_behind = False
        """Whether more than `NEWS_BYTES` of news waited for the reader."""
        self._newest = 0
        """The newest position of all news."""
        self._tries = 0
        """Reads that found no message although there was news: another server of a cluster may lag."""

    async def begin(self) -> None:
        """Reads the first batch. Raises BusUnavailable, BusRefused."""
        self._answers = await self.connection.take(f"{self._inbox}.*", self.receive)
        await self.read()

    async def next(self) -> Received:
        """The next message. Raises BusUnavailable if nothing more can be read on this connection, and BusRefused."""
        while True:
            if self._is_behind:
                await self.end_news()
            if self._beyond[0] and self._requested == self._batch:
                await self.request(*self._beyond)
            while self._arrived:
                received = self.take(self._arrived.popleft())
                if received is not None:
                    return received
            received = None if self._reading else self.take_news()
            if received is not None:
                return received
            self._change = anyio.Event()
            if self._reading:
                with self.connection.waiting(self._source, SILENCE):
                    await self._change.wait()
            elif self._waiting or self._newest > self._position:
                await self.read_again()
            elif self._announcements is None:
                self._announcements = await self.connection.take(self._news_subject, self.take_stored)
                await self.read()  # messages that were stored before the subscription
            else:
                await self.wait_for_news()

    async def read_again(self) -> None:
        """Reads the next batch. Waits first if the store had no message although there was news of one."""
        if self._tries:
            with anyio.move_on_after(backoff_seconds(self._tries, FIRST_PAUSE / 4, LONGEST_PAUSE)):
                await self.connection.lost.wait()
        await self.read()

    async def read(self) -> None:
        """Requests the messages after the position."""
        self.begin_batch()
        await self.request(self._waiting, self._position)

    def begin_batch(self) -> None:
        """Starts reading the next batch. The caller requests it, unless it was requested ahead."""
        self._batch += 1
        self._reply = b".%d" % self._batch
        self._reading = True
        self._before = 0

    async def request(self, waiting: int, after: int) -> None:
        """Requests the next batch: the messages after position `after`. `waiting`: how many there are, as far as known."""
        self._requested += 1
        self._beyond = (0, 0)
        wish = {
            "seq": after + 1,
            "batch": min(max(BATCH, waiting), LARGEST_BATCH),
            "max_bytes": BATCH_BYTES,
            **self._filter,
        }
        await self.connection.send(self._source, msgspec.json.encode(wish), f"{self._inbox}.{self._requested}")

    def take(self, delivered: Delivered) -> Received | None:
        """
        The message, if it belongs to the current batch; None for the end of the batch, and for a message of no batch or
        an earlier one. Raises BusUnavailable if a message is missing, and the errors of `end_batch`.
        """
        if not self._reading or not delivered.subject.endswith(self._reply):
            return None
        if delivered.is_without_message:
            self.end_batch(delivered)
            return None
        there = delivered.in_store()
        if there.before != self._before:
            raise BusUnavailable(f"a message of {self._stream} between {self._before} and {there.position} is missing")
        self._before = self._position = there.position
        self._waiting = there.waiting
        self._tries = 0
        self.stored = there.stored
        return delivered.received_at(there)

    def end_batch(self, end: Delivered) -> None:
        """Handles the end of a batch. Raises BusUnavailable if a message is missing, BusRefused if no store answers."""
        status, description = end.status
        if status == NO_RESPONDERS:
            raise nobody_reads(self._stream)
        if status not in (END_OF_BATCH, NO_MESSAGE):
            raise BusUnavailable(f"reading {self._stream}: {status} {clean(description, 100)}")
        _, last = end.after_batch
        if last > self._position:
            raise BusUnavailable(f"a message of {self._stream} between {self._position} and {last} is missing")
        if status == NO_MESSAGE:
            self._waiting = 0
            self._tries += 1
            if self._tries > MOST_TRIES:  # it was deleted
                self._newest = self._position
        self._reading = False
        if self._requested > self._batch:
            self.begin_batch()

    async def wait_for_news(self) -> None:
        """Returns when news arrives, or otherwise after a check of the store."""
        self._tries = 0
        with self.connection.waiting(self._news_subject, LOOK + SILENCE), anyio.move_on_after(until_tick(CLOCK, LOOK)):
            await self._change.wait()
            return
        await self.look()

    async def look(self) -> None:
        """Checks for stored messages. Raises BusUnavailable if the stream went back; then it is read from its start."""
        last = await find_message(self.connection, self._stream, {"last_by_subj": self._subject})
        newest = 0 if last is None else last.in_store().position
        if 0 < newest < self._position:
            raise BusUnavailable(f"stream {self._stream} went back")
        self._newest = max(self._newest, newest)

    def take_news(self) -> Received | None:
        """Returns the oldest unread news if it is the next message; otherwise drops all news. Raises BusUnavailable."""
        while self._news:
            there, delivered = self._news.popleft()
            self._news_bytes -= len(delivered.body)
            if there.position <= self._position:
                if self.stored and there.stored.rstrip(b"Z") > self.stored.rstrip(b"Z"):
                    raise BusUnavailable(f"stream {self._stream} went back")  # a later message at an earlier position
                continue
            is_next = there.position == self._position + 1 or (self._is_one_subject and there.before <= self._position)
            if is_next and delivered.body:  # without a body, the store publishes only positions
                self._position = there.position
                self.stored = there.stored
                return delivered.received_at(there._replace(waiting=len(self._news)))
            self.drop_news()
        return None

    def drop_news(self) -> None:
        """Drops all news; the store has the messages."""
        self._news.clear()
        self._news_bytes = 0

    def take_stored(self, delivered: Delivered) -> None:
        """Receives news of a stored message. With the subject `>`, the message can be of another stream."""
        with suppress(BusUnavailable):
            there = delivered.in_store()
            if there.stream == self._stream_name:
                self._newest = max(self._newest, there.position)
                self._news.append((there, delivered))
                self._news_bytes += len(delivered.body)
                if self._news_bytes > NEWS_BYTES:
                    self._is_behind = True
                    self.drop_news()
                self._change.set()

    def receive(self, delivered: Delivered) -> None:
        """Handles a message of the server."""
        self._arrived.append(delivered)
        if delivered.is_without_message and delivered.subject.endswith(b".%d" % self._requested):
            self._beyond = delivered.after_batch
        self._change.set()

    async def end(self) -> None:
        """Ends the subscriptions."""
        await self.end_news()
        if self._answers is not None:
            await self.connection.unsubscribe(self._answers)

    async def end_news(self) -> None:
        """Ends the subscription to news."""
        self._is_behind = False
        self.drop_news()
        if self._announcements is not None:
            subscription = self._announcements
            self._announcements = None
            await self.connection.unsubscribe(subscription)


class NatsFollower:
    """The endless iterator that `NatsBus.follow` yields."""

    def __init__(
        self, connected: Callable[[], Awaitable[NatsConnection]], stream: Stream, subject: str, after: int
    ) -> None:
        self._connected = connected
        self._stream = stream
        self._subject = subject
        self._position = after
        self._stored = b""
        """When the message at the position was stored; empty: no message was read yet."""
        self._reading: FollowerReading | None = None
        self._failures = 0
        self._refusal = ""
        """The logged reason of the server's refusal; empty without one."""

    def __aiter__(self) -> "NatsFollower":
        return self

    async def __anext__(self) -> Received:
        while True:
            try:
                if self._reading is None:
                    self._reading = await self.begin(await self._connected())
                received = await self._reading.next()
            except BusUnavailable as error:
                log.debug("following again", stream=self._stream, after=self._position, finding=error.finding)
                await self.pause(LONGEST_PAUSE)
                continue
            except BusRefused as error:
                if error.finding != self._refusal:
                    self._refusal = error.finding
                    log.warning("cannot follow", stream=self._stream, finding=error.finding, remedy=error.remedy)
                await self.pause(REFUSED_PAUSE)
                continue
            self._failures = 0
            self._refusal = ""
            self._position = received.position
            self._stored = self._reading.stored
            return received

    async def pause(self, longest: float) -> None:
        """Ends the failed reading, and waits before the next one, at most `longest` seconds."""
        await self.end()
        self._failures += 1
        await anyio.sleep(backoff_seconds(self._failures, FIRST_PAUSE, longest))

    async def begin(self, connection: NatsConnection) -> FollowerReading:
        """Begins to read the stream, from its start if it went back. Raises BusUnavailable, BusRefused."""
        if self._position and await self.has_gone_back(connection):
            log.warning("stream went back", stream=self._stream, had=self._position)
            self._position = 0
            self._stored = b""
        reading = FollowerReading(connection, self._stream, self._subject, self._position, self._stored)
        try:
            await reading.begin()
        except BaseException:
            await self.end(reading)
            raise
        return reading

    async def has_gone_back(self, connection: NatsConnection) -> bool:
        """Whether the stream was lost or restored: it has another message at the position, or ends before it."""
        there = await find_message(connection, self._stream, {"seq": self._position})
        if there is not None:
            return self._stored not in (b"", there.in_store().stored)
        last = await find_message(connection, self._stream, {"last_by_subj": ">"})
        return last is None or last.in_store().position < self._position

    async def end(self, reading: FollowerReading | None = None) -> None:
        """Ends the reading."""
        ending = reading or self._reading
        self._reading = None
        if ending is not None:
            await ending.end()
