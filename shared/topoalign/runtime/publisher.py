"""
Publishes what one writer has to say until the bus has confirmed it, in the writer's order and for as long as it takes.

A publication that is not confirmed may have been stored all the same, so the same message is published again; the store and
every listener drop the repetition by its id. A round publishes all that is due. Where something of a round is not confirmed
the next round waits, the longer the more rounds have failed in a row: 0.2, 0.4, 0.8 and so on up to 5 seconds.

A writer whose facts stand in one order has one message due at a time, the oldest; one of whose subjects only the newest
message matters has one due for each subject.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from topoalign.core.model.errors import BusRefused, Unavailable
from topoalign.core.ports import Clock, Message
from topoalign.runtime.backoff import backoff_seconds

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between rounds while the bus does not confirm; doubled each time."""

log = structlog.get_logger("topoalign.runtime.publisher")


class Source(Protocol):
    """Protocol: what a writer still has to publish."""

    def due(self) -> Sequence[Message]:
        """The messages of the next round, in the order to publish them. Empty: nothing waits."""

    def confirm(self, message: Message, position: int) -> None:
        """The bus has this message of the last `due`, at this position of its stream."""

    async def wait(self) -> None:
        """Until something may be due."""


class Publisher:
    """Publishes one source."""

    def __init__(self, source: Source, publish: Callable[[Message], Awaitable[int]], clock: Clock) -> None:
        """`publish` tries once: it returns the position in the stream, or raises Unavailable."""
        self._source, self._publish, self._clock = source, publish, clock
        self.failures = 0
        """Rounds in a row in which something was not confirmed."""
        self.refusal: str | None = None
        """Why the bus does not take what was tried last, as when its store is full; None if it took it or is away."""
        self._findings: set[str] = set()
        """Logged since the bus last confirmed something: each reason is logged once."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._source.wait()
            while messages := self._source.due():
                confirmed = [await self._try(message) for message in messages]
                if not all(confirmed):
                    self.failures += 1
                    await self._clock.sleep(backoff_seconds(self.failures, FIRST_PAUSE, LONGEST_PAUSE))

    async def _try(self, message: Message) -> bool:
        """Publishes once. Returns whether the bus has confirmed it."""
        try:
            position = await self._publish(message)
        except Unavailable as error:
            self.refusal = error.finding if isinstance(error, BusRefused) else None
            if error.finding not in self._findings:
                self._findings.add(error.finding)
                log.warning("bus does not confirm", subject=message.subject, finding=error.finding, remedy=error.remedy)
            return False
        if self.failures:
            log.info("bus confirms again", subject=message.subject, tries=self.failures)
        self.failures, self.refusal = 0, None
        self._findings.clear()
        self._source.confirm(message, position)
        return True
