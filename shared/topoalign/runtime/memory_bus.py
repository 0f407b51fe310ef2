"""
`MemoryBus`: the bus port within one process, for tests and simulation.

It has the same guarantees as the bus over NATS and passes the same contract tests. The messages of a stream have
positions, and a repeated message id is stored once. If only the newest messages of each subject matter, a stream keeps
only these. Requests are answered one at a time. All data is lost when the process ends.
"""

import asyncio
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import BusConflict, BusUnavailable, IdTaken, NobodyAnswers, Unavailable, clean
from topoalign.core.ports import Endpoint, Message, Received, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.replies import reply_to
from topoalign.runtime.tasks import background

KEPT_PER_SUBJECT = {
    Stream(store.name): store.max_msgs_per_subject for store in event_stores.STORES if store.max_msgs_per_subject > 0
}


class Log:
    """One stream: messages in the order of their positions, some of which may have been deleted."""

    def __init__(self, per_subject: int | None) -> None:
        self.kept: list[Received] = []
        self.last = 0
        self.changed = anyio.Event()
        self._per_subject = per_subject
        self._of_subject: defaultdict[str, deque[int]] = defaultdict(deque)
        self._ids: dict[str, int] = {}
        self.newest: dict[str, Received] = {}
        """Subject -> its newest message that is kept."""

    def append(self, message: Message) -> int:
        """Stores a message. Returns its position, or that of an equal message with its id. Raises IdTaken."""
        name = message.headers.get("Nats-Msg-Id")
        if name is not None and name in self._ids:
            position = self._ids[name]
            if not wire.is_repetition(self.kept[self.index_after(position - 1)].message, message):
                raise IdTaken(name, f"message {position} of the stream is another one")
            return position
        self.last += 1
        self.newest[message.subject] = Received(message=message, position=self.last)
        self.kept.append(self.newest[message.subject])
        if name is not None:
            self._ids[name] = self.last
        self.drop_old(message.subject)
        self.changed.set()
        self.changed = anyio.Event()
        return self.last

    def check_expected(self, message: Message, expected: int) -> int | None:
        """
        None if the newest message of the subject has the position `expected`. Otherwise, the position of this message
        if it is the next message of the subject. Raises BusConflict in all other cases.
        """
        newest = self.newest.get(message.subject)
        if (newest.position if newest is not None else 0) == expected:
            return None
        following = self.after(expected, message.subject)
        if following is not None and wire.is_repetition(following.message, message):
            return following.position
        raise BusConflict(message.subject, expected)

    def append_all(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """Stores all or none; returns their positions, also for a repeated batch. Raises BusConflict, IdTaken."""
        there = [self.check_expected(message, expected) for message, expected in batch]
        if None not in there:
            return [position for position in there if position is not None]
        for (message, expected), position in zip(batch, there, strict=True):
            if position is not None:
                raise BusConflict(message.subject, expected)
            if (name := message.headers.get("Nats-Msg-Id")) in self._ids:
                raise IdTaken(str(name), f"message {self._ids[str(name)]} of the stream is another one")
        return [self.append(message) for message, _ in batch]

    def drop_old(self, subject: str) -> None:
        """Deletes the oldest message of a subject above its limit. Unlike NATS, it limits neither age nor size."""
        if self._per_subject is None:
            return
        positions = self._of_subject[subject]
        positions.append(self.last)
        if len(positions) > self._per_subject:
            oldest = positions.popleft()
            self.drop(self.index_after(oldest - 1), self.index_after(oldest))

    def drop(self, start: int, stop: int) -> None:
        """Deletes the messages at these indices, and their ids."""
        for old in self.kept[start:stop]:
            self._ids.pop(old.message.headers.get("Nats-Msg-Id", ""), None)
            if self.newest.get(old.message.subject) is old:
                del self.newest[old.message.subject]
        del self.kept[start:stop]

    def forget(self, subject: str) -> None:
        """Deletes the messages of matching subjects."""
        for index in reversed(range(len(self.kept))):
            if event_stores.matches_subject(subject, self.kept[index].message.subject):
                self.drop(index, index + 1)

    def index_after(self, position: int) -> int:
        """The index of the first message after a position."""
        return bisect_right(self.kept, position, key=lambda received: received.position)

    def after(self, position: int, subject: str) -> Received | None:
        """The first message after this position whose subject matches."""
        for index in range(self.index_after(position), len(self.kept)):
            if event_stores.matches_subject(subject, self.kept[index].message.subject):
                return self.kept[index]
        return None


class MemoryFollower:
    """The endless iterator that `MemoryBus.follow` yields."""

    def __init__(self, log: Log, subject: str, after: int) -> None:
        self._log = log
        self._subject = subject
        self._position = after if after <= log.last else 0

    def __aiter__(self) -> "MemoryFollower":
        return self

    async def __anext__(self) -> Received:
        while (received := self._log.after(self._position, self._subject)) is None:
            self._position = self._log.last
            await self._log.changed.wait()
        await anyio.lowlevel.checkpoint()
        self._position = received.position
        return msgspec.structs.replace(received, waiting=self._log.last - received.position)


class Responder:
    """Answers the requests to one endpoint in order. A client that gives up does not cancel a request in progress."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._questions: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        self._news = anyio.Event()

    async def run(self) -> None:
        """Answers requests until cancelled."""
        while True:
            while self._questions:
                body, answer = self._questions.popleft()
                reply = await reply_to(self.endpoint, body)
                if not answer.done():
                    answer.set_result(reply)
            self._news = anyio.Event()
            await self._news.wait()

    async def ask(self, body: bytes, within: float) -> bytes:
        """The answer to a request. Raises BusUnavailable after `within` seconds without one."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions.append((body, answer))
        self._news.set()
        with anyio.move_on_after(within):
            return await answer
        raise BusUnavailable(f"no answer on {self.endpoint.subject} within {within:g} s")


class MemoryBus:
    """A bus for all services of one process."""

    def __init__(self) -> None:
        self._logs = {stream: Log(KEPT_PER_SUBJECT.get(stream)) for stream in Stream}
        self._responders: list[Responder] = []

    @property
    def connected(self) -> bool:
        """Always true."""
        return True

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """Stores a message and returns its position. Raises IdTaken, and BusConflict if `expected_last` is outdated."""
        log = self._logs[event_stores.store_of(message)]
        await anyio.lowlevel.checkpoint()
        there = None if expected_last is None else log.check_expected(message, expected_last)
        return log.append(message) if there is None else there

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """As `Bus.publish_batch`."""
        stream = event_stores.store_of_batch([message for message, _ in batch])
        await anyio.lowlevel.checkpoint()
        return self._logs[stream].append_all(batch)

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """The newest message of a subject; None if there is none."""
        await anyio.lowlevel.checkpoint()
        return self._logs[stream].newest.get(subject)

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """Stores messages in this order and returns their positions; None from the first one that `publish` refuses."""
        positions: list[int | None] = []
        for message in messages:
            position = None
            with suppress(Unavailable):
                position = await self.publish(message)
            positions.append(position if None not in positions[-1:] else None)
        return positions

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        """Yields the messages of a stream on this subject, stored and new, after a position."""
        yield MemoryFollower(self._logs[stream], subject, after)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """The position of the newest message on a subject; 0 if there is none."""
        await anyio.lowlevel.checkpoint()
        for received in reversed(self._logs[stream].kept):
            if event_stores.matches_subject(subject, received.message.subject):
                return received.position
        return 0

    async def forget(self, stream: Stream, subject: str) -> None:
        """Deletes all messages on a subject."""
        await anyio.lowlevel.checkpoint()
        self._logs[stream].forget(subject)

    def answers(self, subject: str) -> bool:
        """Whether a service of this process answers on this subject."""
        return any(event_stores.matches_subject(responder.endpoint.subject, subject) for responder in self._responders)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """The answer to a request. Raises NobodyAnswers, and BusUnavailable after `within` seconds."""
        event_stores.check_size(subject, body)
        for responder in self._responders:
            if event_stores.matches_subject(responder.endpoint.subject, subject):
                return await responder.ask(body, within)
        raise NobodyAnswers(f"nobody answers on {clean(subject, 200)}")

    @asynccontextmanager
    async def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
        """Serves these endpoints while the context is open."""
        responders = [Responder(endpoint) for endpoint in endpoints]
        async with background() as tasks:
            for responder in responders:
                tasks.start_soon(responder.run)
            self._responders += responders
            try:
                yield
            finally:
                self._responders = [responder for responder in self._responders if responder not in responders]
