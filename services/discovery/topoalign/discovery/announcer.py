"""
Says on the bus what is newest, and says it for as long as it takes.

Of topology and health only the newest matters, so at most one message of each kind waits. One that is not confirmed may
have been stored all the same and is repeated under the same id. A stream that was lost or rolled back no longer has what
was said, so every now and then it is looked at, and everything is said anew.
"""

from collections.abc import Callable

import anyio
import structlog

from topoalign.core import wire
from topoalign.core.errors import Unavailable
from topoalign.core.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.ports import Bus, Clock, Message, Stream

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between tries while the bus does not confirm; doubled each time."""
LOOK_SECONDS = 60.0
"""Between two looks at whether the stream still has what was said."""

log = structlog.get_logger("topoalign.discovery")


class Announcer:
    """Publishes the newest message of each subject."""

    def __init__(self, bus: Bus, hub: Bus, clock: Clock) -> None:
        """`hub` is the bus that everybody hears, where `bus` also has a shorter way to the services of this process."""
        self._bus, self._hub, self._clock = bus, hub, clock
        self._waiting: dict[str, Message] = {}
        self._news = anyio.Event()
        self._positions: dict[str, int] = {}
        self._failures = 0
        """Rounds in a row in which something was not confirmed."""
        self._trouble = ""

    def say(self, event: TopologyDiscovered | DeviceHealthChanged) -> None:
        message = wire.encode(event, self._clock.wall())
        self._waiting[message.subject] = message
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            while self._waiting:
                confirmed = [await self._publish(message) for message in list(self._waiting.values())]
                if not all(confirmed):
                    self._failures += 1
                    await self._clock.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 10)))

    async def _publish(self, message: Message) -> bool:
        """Tries once; whether the bus has confirmed it."""
        try:
            position = await self._bus.publish(message)
        except Unavailable as error:
            if error.finding != self._trouble:
                log.warning("bus does not confirm", finding=error.finding, remedy=error.remedy)
            self._trouble = error.finding
            return False
        if self._failures:
            log.info("bus confirms again", tries=self._failures)
        self._failures, self._trouble = 0, ""
        self._positions[message.subject] = position
        if self._waiting.get(message.subject) is message:
            del self._waiting[message.subject]
        return True

    async def watch(self, say_anew: Callable[[], None]) -> None:
        """Calls `say_anew` whenever the stream has lost what was said."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            if await self._lost():
                log.warning("the stream of nodes has lost what was said")
                self._positions.clear()
                say_anew()

    async def _lost(self) -> bool:
        for subject, position in list(self._positions.items()):
            try:
                if await self._hub.last_position(Stream.NODES, subject) < position:
                    return True
            except Unavailable:
                return False
        return False
