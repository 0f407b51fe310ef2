"""
Publishes facts of which this process is the only writer.

The store on the bus drops a message whose id it has seen. If another client publishes under ids of this writer, by
mistake or on purpose, the facts of this writer would be dropped. So a fact whose id is taken is published under another
id, which nobody can predict. Subscribers identify facts by the numbers in the body, so a fact that is stored twice is
delivered once.
"""

from secrets import token_hex

import structlog

from topoalign.core import wire
from topoalign.core.model.errors import IdTaken
from topoalign.core.ports import Bus, Message

log = structlog.get_logger("topoalign.runtime.fact_publisher")


class FactPublisher:
    """Publishes the facts of one writer, and counts those whose ids were taken."""

    def __init__(self, bus: Bus) -> None:
        self.taken = 0
        """Publications whose id the store had for another message, or that could not be compared with what it has."""
        self._bus = bus
        self._finding = ""

    async def publish(self, message: Message) -> int:
        """As `Bus.publish`; under another id where the message's own is taken, which is logged the first time."""
        try:
            return await self._bus.publish(message)
        except IdTaken as error:
            self.taken += 1
            self._finding = error.finding
            if self.taken == 1:
                event = "the id of a fact is taken: it goes out under another one"
                log.warning(event, finding=error.finding, remedy=error.remedy)
        return await self._bus.publish(wire.with_message_mark(message, token_hex(8)))

    def note(self) -> str | None:
        """The note for /readyz?verbose: facts went out under other ids since the start."""
        if not self.taken:
            return None
        return f"{self.taken} facts went out under other ids than their own; the last because {self._finding}"
