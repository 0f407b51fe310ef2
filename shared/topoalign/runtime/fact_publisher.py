"""
Publishes facts of which this process is the only writer.

The store on the bus drops a message whose id it has seen. If another client publishes with ids of this writer, by
mistake or on purpose, the store would drop the facts of this writer. So a fact whose id is taken is published with an
unpredictable id. Subscribers identify facts by the numbers in the body, so a fact stored twice is delivered once.
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
        """Publications whose id the store already had, for another message or for one that could not be compared."""
        self._bus = bus
        self._finding = ""

    async def publish(self, message: Message) -> int:
        """Publishes as `Bus.publish` does, or with another id if the message's is taken. Logs the first such case."""
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
        """The note for /readyz?verbose if facts were published with other ids since the start; None otherwise."""
        if not self.taken:
            return None
        return f"{self.taken} facts went out under other ids than their own; the last because {self._finding}"
