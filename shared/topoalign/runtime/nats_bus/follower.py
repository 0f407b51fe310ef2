"""
Follows a stream: messages in order, each at least once, through any number of lost connections.

The server keeps only a short-lived consumer without acknowledgements; the position is kept here. Messages are
fetched in batches when the reader asks, so a slow reader costs the server nothing. While a batch is under way the
server sends a heartbeat every two seconds. If a heartbeat is missing, or a message is missing from the count, or the
connection is lost, the consumer is created again from the position after the last message that the reader had.

A refusal is treated like a loss, because operators change permissions and limits while the process runs. It is logged
once, with its remedy.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import token_hex

import anyio
import msgspec
import nats.errors
import structlog
from nats.aio.subscription import Subscription

from topoalign.core.model.errors import BusRefused, BusUnavailable, clean
from topoalign.core.ports import Received, Stream
from topoalign.runtime.backoff import backoff_seconds
from topoalign.runtime.nats_bus.connection import Connection
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.library import contained
from topoalign.runtime.stores import NOT_FOUND, SECOND, Info, refused, stream_info

BATCH, LARGEST_BATCH = 128, 1000
"""Messages of one fetch. It is larger where more wait: each costs a round trip, in which nothing is read."""
BATCH_BYTES = 4 * 1024 * 1024
EXPIRES = 30.0
"""Seconds a fetch waits at the server for messages to come."""
HEARTBEAT = 2.0
SILENCE = 5.0
"""Seconds without message or sign of life after which the consumer is taken for dead."""
IDLE = 60
"""Seconds after which the server forgets a consumer that nobody fetches from."""
FIRST_PAUSE, LONGEST_PAUSE, REFUSED_PAUSE = 0.02, 2.0, 5.0
"""Seconds between tries: after the first failure, and at most after a loss and after a refusal."""

log = structlog.get_logger("topoalign.runtime.nats")


class Pull:
    """A consumer on one connection."""

    def __init__(self, connection: Connection, stream: Stream, name: str) -> None:
        self.connection = connection
        self._stream, self._name = stream, name
        self._inbox = connection.client.new_inbox()
        self._subscription: Subscription | None = None
        self._arrived: deque[Delivered] = deque()
        self._news = anyio.Event()
        self._due = 0
        """Messages that the fetch under way may still bring."""
        self._count = 0
        """Messages this consumer has brought."""
        self._waiting = 0
        """Messages that waited behind the last of them."""

    async def begin(self, subject: str, after: int) -> None:
        """Create the consumer, from the message after a position."""
        self._subscription = await self.connection.take(self._inbox, self.heard)
        config = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": after + 1,
            "ack_policy": "none",
            "filter_subject": subject,
            "inactive_threshold": IDLE * SECOND,
            "mem_storage": True,
            "num_replicas": 1,
        }
        answer = await self.connection.api(
            f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}.{subject}",
            msgspec.json.encode({"stream_name": self._stream, "config": config, "action": "create"}),
        )
        created = msgspec.json.decode(answer, type=Info)
        if created.error is not None:
            raise refused(f"following {self._stream}", created.error)

    async def next(self) -> Received:
        """Raises BusUnavailable if this consumer will bring nothing more."""
        while True:
            while self._arrived:
                received = self.take(self._arrived.popleft())
                if received is not None:
                    return received
            self._news = anyio.Event()
            if self._due <= 0:
                await self.fetch()
            if not self._arrived:
                with self.connection.waiting(self._inbox, SILENCE):
                    await self._news.wait()

    async def fetch(self) -> None:
        """Request the next batch; the server sends heartbeats until it ends."""
        self._due = min(max(BATCH, self._waiting), LARGEST_BATCH)
        wish = {
            "batch": self._due,
            "max_bytes": BATCH_BYTES,
            "expires": int(EXPIRES * SECOND),
            "idle_heartbeat": int(HEARTBEAT * SECOND),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        await self.connection.send(subject, msgspec.json.encode(wish), self._inbox)

    def take(self, delivered: Delivered) -> Received | None:
        """A message of the stream, or None for the server's remarks about the fetch."""
        if delivered.is_remark:
            self.remark(*delivered.status)
            return None
        count, received = delivered.counted()
        if count != self._count + 1:
            raise BusUnavailable(f"message {self._count + 1} of a fetch from {self._stream} is missing")
        self._count += 1
        self._due -= 1
        self._waiting = received.waiting
        return received

    def remark(self, status: str, description: str) -> None:
        """100 is a sign of life; 408 and 409 end the fetch, unless the consumer itself is gone; others are failures."""
        if status == "409" and description.startswith("Exceeded"):
            raise BusRefused(
                f"fetching from {self._stream}: {clean(description, 100)}",
                f"allow consumers at least {LARGEST_BATCH} messages and {BATCH_BYTES} bytes a request",
            )
        ended = status == "408" or (status == "409" and "Consumer" not in description)
        if ended:
            self._due = 0
        elif status != "100":
            raise BusUnavailable(f"fetching from {self._stream}: {status} {clean(description, 100)}")

    def heard(self, delivered: Delivered) -> None:
        """Handle a message of the server."""
        self._arrived.append(delivered)
        self._news.set()

    async def end(self) -> None:
        """Takes the consumer away, if the server can still be told."""
        if self._subscription is None or self.connection.lost.is_set():
            return
        with suppress(nats.errors.Error, OSError), contained():
            await self._subscription.unsubscribe()
        with suppress(BusUnavailable, BusRefused):
            await self.connection.api(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"")


class Follower:
    """The endless iterator that `NatsBus.follow` hands out."""

    def __init__(
        self,
        connected: Callable[[], Awaitable[Connection]],
        repair: Callable[[Connection], Awaitable[object]],
        stream: Stream,
        subject: str,
        after: int,
    ) -> None:
        self._connected, self._repair = connected, repair
        self._stream, self._subject, self._position = stream, subject, after
        self._created = ""
        """When the stream was made, which tells it from another one of the same name."""
        self._pull: Pull | None = None
        self._name = fresh_name()
        """Of the next consumer; kept while the server refuses it, so that a refusal that is repeated reads the same."""
        self._failures = 0
        self._refusal = ""
        """Why the server refuses, as logged; empty while it does not."""

    def __aiter__(self) -> "Follower":
        return self

    async def __anext__(self) -> Received:
        while True:
            try:
                if self._pull is None:
                    self._pull = await self.begin(await self._connected())
                received = await self._pull.next()
            except BusUnavailable as error:
                log.debug("following again", stream=self._stream, after=self._position, finding=error.finding)
                self._name = fresh_name()
                await self.pause(LONGEST_PAUSE)
                continue
            except BusRefused as error:
                if error.finding != self._refusal:
                    self._refusal = error.finding
                    log.warning("cannot follow", stream=self._stream, finding=error.finding, remedy=error.remedy)
                await self.pause(REFUSED_PAUSE)
                continue
            self._failures = 0
            self._position = received.position
            return received

    async def pause(self, longest: float) -> None:
        """Between a consumer that failed and the next."""
        await self.end()
        self._failures += 1
        await anyio.sleep(backoff_seconds(self._failures, FIRST_PAUSE, longest))

    async def begin(self, connection: Connection) -> Pull:
        """
        Check the stream and start a consumer on it. A stream that went back is read from its beginning.
        Raises BusUnavailable, BusRefused.
        """
        info = await stream_info(connection.api, self._stream)
        if info.error is not None and info.error.err_code == NOT_FOUND:
            await self._repair(connection)
            raise BusUnavailable(f"store {self._stream} was missing")
        if info.error is not None:
            raise refused(f"store {self._stream}", info.error)
        if self._created not in ("", info.created) or info.state.last_seq < self._position:
            log.warning("stream went back", stream=self._stream, had=self._position, newest=info.state.last_seq)
            self._position = 0
        self._created = info.created
        pull = Pull(connection, self._stream, self._name)
        try:
            await pull.begin(self._subject, self._position)
        except BaseException:
            await self.end(pull)
            raise
        self._name, self._refusal = fresh_name(), ""
        return pull

    async def end(self, pull: Pull | None = None) -> None:
        """End the consumer, within a second."""
        ending, self._pull = pull or self._pull, None
        if ending is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await ending.end()


def fresh_name() -> str:
    """Of a consumer that nobody else has."""
    return f"follow-{token_hex(8)}"
