"""
Publishes facts of which this process is the only writer.

The store on the bus drops a message whose id it has seen. If another client publishes under ids of this writer, by
mistake or on purpose, the facts of this writer would be dropped. So a fact whose id is taken is published under another
id, which nobody can predict. Subscribers identify facts by the numbers in the body, so a fact that is stored twice is
delivered once.
"""

from collections.abc import Sequence
from secrets import token_hex

import structlog

from topoalign.core import wire
from topoalign.core.model.errors import IdTaken
from topoalign.core.ports import Bus, Clock, Message

LOG_SECONDS = 60.0
"""Between two log lines about taken ids."""
NOTE_SECONDS = 3600.0
"""For how long the note of /readyz?verbose stays after the last taken id."""

log = structlog.get_logger("topoalign.runtime.fact_publisher")


class FactPublisher:
    """Publishes the facts of one writer, and counts those whose ids were taken."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.taken = 0
        """Publications whose id the store had for another message, or that could not be compared with what it has."""
        self._bus = bus
        self._clock = clock
        self._logged: float | None = None
        self._finding = ""
        self._last = 0.0

    async def publish(self, message: Message) -> int:
        """As `Bus.publish`; under another id where the message's own is taken."""
        try:
            return await self._bus.publish(message)
        except IdTaken as error:
            self._log(error)
        return await self._bus.publish(wire.with_message_mark(message, token_hex(8)))

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """As `Bus.publish_all`: a message whose id is taken has no position, and `publish` finds another id for it."""
        return await self._bus.publish_all(messages)

    def note(self) -> str | None:
        """The note for /readyz?verbose: facts went out under other ids in the last hour."""
        if not self.taken or self._clock.monotonic() > self._last + NOTE_SECONDS:
            return None
        return f"{self.taken} facts went out under other ids than their own; the last because {self._finding}"

    def _log(self, error: IdTaken) -> None:
        now = self._clock.monotonic()
        self.taken += 1
        self._last = now
        self._finding = error.finding
        if self._logged is None or now >= self._logged + LOG_SECONDS:
            self._logged = now
            log.warning(
                "the id of a fact is taken: it goes out under another one",
                finding=error.finding,
                remedy=error.remedy,
                taken=self.taken,
            )
