"""
Publishes the messages of one writer until the bus has confirmed them, in the writer's order and without a time limit.

A message that was not confirmed may still have been stored. So the same message is published again, and the store and
every subscriber drop the repetition by its id. A round publishes all messages that are due. If one of them is not
confirmed, the next round waits 0.2, 0.4, 0.8 and so on up to 5 seconds.

- If only the newest message of each subject matters, one message is due for each subject. Each round tries all of them.
- If the facts have one order, several are due (`publish_all`). A round confirms the facts before the first unconfirmed
  one; the remaining facts are due again. Then the oldest is published alone until it is confirmed. So at most one round
  publishes facts after one that the bus does not accept.

The stream's order differs from the writer's only if the bus stored a later message of a round but not an earlier one.
The writer receives each position in its own order, and publishes a message to close the gap (`Source.confirm`).
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Protocol

import structlog

from topoalign.core.model.errors import BusRefused, Unavailable
from topoalign.core.ports import Clock, Message
from topoalign.runtime.clock import backoff_seconds

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
"""Seconds between rounds while the bus does not confirm; the first pause is doubled up to the longest."""

log = structlog.get_logger("topoalign.runtime.publisher")


Confirmed = tuple[Message, int]
"""A message that the bus has stored, and its position in its stream."""


class Source(Protocol):
    """Protocol: the messages that a writer still has to publish."""

    def due(self) -> Sequence[Message]:
        """The messages of the next round, in the order in which to publish them. Empty: none."""

    def confirm(self, confirmed: Sequence[Confirmed]) -> None:
        """Receives the messages of the last `due` that the bus has stored, in the same order."""

    async def wait(self) -> None:
        """Waits until a message can be due."""


class Publisher:
    """Publishes one source."""

    def __init__(
        self,
        source: Source,
        publish: Callable[[Message], Awaitable[int]],
        clock: Clock,
        publish_all: Callable[[Sequence[Message]], Awaitable[Sequence[int | None]]] | None = None,
    ) -> None:
        """
        `publish` tries once: it returns the position in the stream, or raises Unavailable. `publish_all` tries several,
        as `Bus.publish_all` does, for a source whose messages have one order.
        """
        self._source = source
        self._publish = publish
        self._publish_all = publish_all
        self._clock = clock
        self.failures = 0
        """Consecutive rounds in which a message was not confirmed."""
        self.refusal: str | None = None
        """Why the bus refused the last publication, such as a full store; None if it accepted it or is unavailable."""
        self._findings: set[str] = set()
        """Findings that were logged since the last confirmation: each is logged once."""
        self.alone = False
        """Whether only the oldest message is published (of messages that have one order)."""

    async def run(self) -> None:
        """Publishes until cancelled."""
        while True:
            await self._source.wait()
            while messages := self._source.due():
                if not await self._round(messages):
                    self.failures += 1
                    await self._clock.sleep(backoff_seconds(self.failures, FIRST_PAUSE, LONGEST_PAUSE))

    async def _round(self, messages: Sequence[Message]) -> bool:
        """Publishes the messages that are due. Returns whether the next round can start at once."""
        if self._publish_all is None:
            return all([await self._try(message) for message in messages])
        if self.alone or len(messages) == 1:
            self.alone = not await self._try(messages[0])
            return not self.alone
        positions = await self._publish_all(messages)
        confirmed = [
            (message, position)
            for message, position in zip(messages, takewhile(lambda at: at is not None, positions), strict=False)
            if position is not None
        ]
        self.alone = len(confirmed) < len(messages)
        if confirmed:
            self._confirm(confirmed)
        return True

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
        self._confirm([(message, position)])
        return True

    def _confirm(self, confirmed: Sequence[Confirmed]) -> None:
        if self.failures:
            log.info("bus confirms again", subject=confirmed[0][0].subject, tries=self.failures)
        self.failures = 0
        self.refusal = None
        self._findings.clear()
        self._source.confirm(confirmed)
