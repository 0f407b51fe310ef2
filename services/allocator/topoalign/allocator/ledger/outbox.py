"""
Publishes the pending facts of the journal in order, up to `MOST_FACTS` at once.

A snapshot is published if the bus stored facts in the wrong order, has lost facts, or has another message under the id
of a fact. Subscribers detect the gap and wait for the snapshot.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.events import LedgerEvent
from topoalign.core.ports import Bus, Clock, Message, Stream
from topoalign.runtime.fact_publisher import FactPublisher
from topoalign.runtime.publisher import Confirmed, Publisher

POLL_SECONDS = 60.0
"""Interval of the check whether the stream still has the published facts."""

MOST_FACTS = 256
MOST_BYTES = 4 * 1024 * 1024
"""Maximum size of the facts in flight. A single fact may be larger."""

log = structlog.get_logger("topoalign.allocator.ledger.outbox")


class Outbox:
    """Publishes the ledger's pending facts to the bus, oldest first."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger = ledger
        self._bus = bus
        self._clock = clock
        self.facts = FactPublisher(bus)
        self.publisher = Publisher(self, self.facts.publish, clock, bus.publish_all)
        self._position = 0
        self._due: list[tuple[Message, LedgerEvent]] = []
        """The messages that `due` last returned, with their facts."""

    async def run(self) -> None:
        """Publishes until cancelled, and retries while the bus is unavailable."""
        await self.publisher.run()

    async def watch(self) -> None:
        """Publishes a snapshot if the stream has lost facts, or if another client has used message ids of this node."""
        subject = wire.allocation_subjects(self._ledger.node)
        taken = 0
        while True:
            await self._clock.sleep(POLL_SECONDS)
            if self.facts.taken > taken:
                taken = self.facts.taken
                self.announce()
            with suppress(Unavailable):
                self.notice(await self._bus.last_position(Stream.ALLOCATIONS, subject))

    def due(self) -> Sequence[Message]:
        """Returns the messages of the oldest pending facts; skips a fact that is too large for the bus."""
        self._due = []
        while self._ledger.pending:
            size = 0
            for event, time in islice(self._ledger.pending, 1 if self.publisher.alone else MOST_FACTS):
                message = wire.encode_event(event, time)
                size += len(message.body)
                if len(message.body) > wire.LARGEST_BODY or (self._due and size > MOST_BYTES):
                    break
                self._due.append((message, event))
            if self._due:
                return [message for message, _ in self._due]
            log.error("fact too large for the bus", type=type(event).__name__, seq=event.seq, bytes=len(message.body))
            self._ledger.published([event])
        return []

    def confirm(self, confirmed: Sequence[Confirmed]) -> None:
        """Removes the facts of these messages from `pending`. They are the oldest that `due` last returned."""
        facts = self._due[: len(confirmed)]
        assert [message for message, _ in facts] == [message for message, _ in confirmed], "the oldest that were due"
        self._ledger.published([event for _, event in facts])
        for _, position in confirmed:
            self.notice(position)

    async def wait(self) -> None:
        """Waits until the ledger has a fact to publish, or has changed."""
        if not self._ledger.pending:
            await self._ledger.wait_past(self._ledger.version)

    def notice(self, position: int) -> None:
        """Compares a stream position with the last one. A lower one means lost facts, so a snapshot is published."""
        if position < self._position:
            log.warning("the allocation stream has lost facts", had=self._position, got=position)
            self._position = position
            self.announce()
        self._position = max(position, self._position)

    def announce(self) -> None:
        """Publishes a snapshot of all live allocations, unless the disk fails."""
        with suppress(StateFault):  # the ledger has logged it; the next lost fact repeats this
            self._ledger.announce()
