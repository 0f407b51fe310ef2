"""
The bus as one process sees it on a bad day: around the product's own `MemoryBus`, which stands for the broker.

It may be away for a time; a publication may time out with the message stored or not, one of many under way, too; a message
may come late, twice, again much later under an id that the broker has forgotten, before the one that it followed, or not at
all. With all chances at zero it is the bus that it stands around, and passes the same contract tests.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random

import anyio
import msgspec

from topoalign.core.model.errors import BusUnavailable, IdTaken
from topoalign.core.ports import Endpoint, Message, Received, Stream
from topoalign.runtime.memory_bus import MemoryBus

LATE_SECONDS = (0.0, 0.001, 0.05, 0.8, 3.0)
SWAP_SECONDS = 0.5
"""How long a message waits for the one that is to overtake it."""
AWAY_SECONDS = 0.5
"""Between two looks at whether the bus is back."""


@dataclass
class Weather:
    """How likely each fault is, from 0 to 1. Shared by all processes; the scenario changes it as the run goes on."""

    away: bool = False
    timeout: float = 0.0
    """A publication is stored, or not, and nobody says which."""
    late: float = 0.0
    repeat: float = 0.0
    """A message is delivered again, at once."""
    again: float = 0.0
    """An old message is stored again, its id being forgotten."""
    swap: float = 0.0
    """Two messages are stored in the other order."""
    lose: float = 0.0
    """A message is never delivered to this follower."""
    lost: bool = False
    """Whether that has happened; stays so."""

    def clear(self) -> None:
        self.away = False
        self.timeout = self.late = self.repeat = self.again = self.swap = self.lose = 0.0


class Broker:
    """What all processes share; or the same bus with a weather of its own, as the processes of one machine have it."""

    def __init__(self, bus: MemoryBus | None = None) -> None:
        self.bus = bus or MemoryBus()
        self.weather = Weather()
        self.number = count(1)

    def stores(self, bodies: Collection[bytes]) -> bool:
        """Whether the stream of allocations has a message with one of these bodies."""
        return any(received.message.body in bodies for received in reversed(self.bus._logs[Stream.ALLOCATIONS].kept))


class FaultyBus:
    """The bus as one process has it: `topoalign.core.ports.Bus`."""

    def __init__(
        self,
        broker: Broker,
        chance: Random,
        is_dead: Callable[[], bool] = lambda: False,
        said: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """`said` is told every message that its process tries to publish."""
        self._broker = broker
        self._bus = broker.bus
        self._weather = broker.weather
        self._chance = chance
        self._is_dead = is_dead
        self._tell = said
        self._said: list[Message] = []

    @property
    def connected(self) -> bool:
        return not self._weather.away

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        self._tell(message)
        await self._reach()
        unknown = happens(self._weather.timeout, self._chance)
        if unknown and self._chance.random() < 0.5:
            raise BusUnavailable("no confirmation within 5 s")
        position = await self._bus.publish(message, expected_last)
        if expected_last is None:  # another is stored once, whatever the broker has forgotten
            self._said.append(message)
        if self._said and happens(self._weather.again, self._chance):
            await self._bus.publish(forgotten(self._chance.choice(self._said), next(self._broker.number)))
        if unknown:
            raise BusUnavailable("no confirmation within 5 s")
        return position

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """
        On one connection, so in order; it may break after any of them. Of each the broker may store nothing, or the
        acknowledgement may be lost, whatever becomes of the next. Acknowledgements that are late are all late.
        """
        positions: list[int | None] = [None] * len(messages)
        with suppress(BusUnavailable):
            for number, message in enumerate(messages):
                self._tell(message)
                if number == 0 or self._chance.random() < 0.1:
                    await self._reach()
                unknown = happens(self._weather.timeout, self._chance)
                if unknown and self._chance.random() < 0.5:
                    continue
                with suppress(IdTaken):
                    position = await self._bus.publish(message)
                    self._said.append(message)
                    positions[number] = None if unknown else position
            await self._reach()
        first = positions.index(None) if None in positions else len(positions)
        return [*positions[:first], *[None] * (len(positions) - first)]

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        await self._reach()
        unknown = happens(self._weather.timeout, self._chance)
        if unknown and self._chance.random() < 0.5:
            raise BusUnavailable("no confirmation within 5 s")
        positions = await self._bus.publish_batch(batch)
        if unknown:
            raise BusUnavailable("no confirmation within 5 s")
        return positions

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        await self._reach()
        return await self._bus.newest(stream, subject)

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        async with self._bus.follow(stream, subject, after) as messages:
            yield Delivered(messages, self._weather, self._chance)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        await self._reach()
        return await self._bus.last_position(stream, subject)

    async def forget(self, stream: Stream, subject: str) -> None:
        await self._reach()
        await self._bus.forget(stream, subject)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        await self._reach(within)
        answer = await self._bus.ask(subject, body, within)
        if happens(self._weather.timeout, self._chance):
            raise BusUnavailable(f"no answer on {subject} within {within:g} s")
        return answer

    def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AbstractAsyncContextManager[None]:
        return self._bus.serve(service, endpoints)

    async def _reach(self, within: float = inf) -> None:
        if self._is_dead():
            await anyio.sleep_forever()
        if happens(self._weather.late, self._chance):
            late = self._chance.choice(LATE_SECONDS)
            await anyio.sleep(min(late, within))
            if late > within:
                raise BusUnavailable(f"no answer within {within:g} s")
        if self._weather.away:
            raise BusUnavailable("the bus is away")


class Delivered:
    """
    What arrives of what was sent, and when. The contract's promises end here: a gap or a swap is for the reader to heal.

    Interrupted while waiting, it loses nothing: what has come stands in line until it is handed over.
    """

    def __init__(self, messages: AsyncIterator[Received], weather: Weather, chance: Random) -> None:
        self._messages = messages
        self._weather = weather
        self._chance = chance
        self._line: list[Received] = []

    def __aiter__(self) -> "Delivered":
        return self

    async def __anext__(self) -> Received:
        while not self._line:
            received = await anext(self._messages)
            if happens(self._weather.lose, self._chance):
                self._weather.lost = True
                continue
            self._line.append(received)
            if happens(self._weather.swap, self._chance):
                with anyio.move_on_after(SWAP_SECONDS):
                    self._line[-1:] = swapped(received, await anext(self._messages))
            if happens(self._weather.repeat, self._chance):
                self._line.append(self._line[-1])
            if happens(self._weather.late, self._chance):
                await anyio.sleep(self._chance.choice(LATE_SECONDS))
        while self._weather.away:  # noqa: ASYNC110  # weather is data that a scenario changes
            await anyio.sleep(AWAY_SECONDS)
        return self._line.pop(0)


def swapped(one: Received, other: Received) -> list[Received]:
    """As if the broker had stored them in the other order; positions go up as ever."""
    return [
        Received(message=other.message, position=one.position),
        Received(message=one.message, position=other.position),
    ]


def happens(likely: float, chance: Random) -> bool:
    return likely > 0 and chance.random() < likely


def forgotten(message: Message, number: int) -> Message:
    """The same fact under a message id that the broker does not know (any more)."""
    return msgspec.structs.replace(message, headers={**message.headers, "Nats-Msg-Id": f"again-{number}"})
