"""
Says on the bus what the journal has and the bus has not, in order and for as long as it takes.

A publication that is not confirmed may have been stored all the same, so it is repeated under the same id; the stream and
every listener drop the repetition. Nothing waits for this: the kubelet has its answer before the first try.

Where the stream has another message under the id of a fact, the fact goes out under another id, and soon afterwards
everything live is said anew: listeners may have believed that message.
"""

from contextlib import suppress

import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, StateFault, Unavailable
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.runtime.backoff import backoff_seconds
from topoalign.runtime.speaker import Speaker

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between tries while the bus does not confirm; doubled each time."""

POLL_SECONDS = 60.0
"""Between two looks at whether the stream still has what was said."""

log = structlog.get_logger("topoalign.allocator.ledger.outbox")


class Outbox:
    """Publishes the ledger's pending facts."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger, self._bus, self._clock = ledger, bus, clock
        self.speaker = Speaker(bus, clock)
        self._position = 0
        self.failures = 0
        """Tries in a row that were not confirmed."""
        self.refusal: str | None = None
        """Why the bus does not take the oldest fact, its store being full or we not permitted; None if it took the last."""

    async def run(self) -> None:
        while True:
            version = self._ledger.version
            while self._ledger.pending:
                await self.publish_oldest()
            await self._ledger.wait_past(version)

    async def watch(self) -> None:
        """
        Looks now and then whether the stream still has what was said: an idle node would not notice otherwise. Has
        everything said anew where somebody else spoke under ids of this node since the last look.
        """
        subject = wire.allocation_subjects(self._ledger.node)
        taken = 0
        while True:
            await self._clock.sleep(POLL_SECONDS)
            if self.speaker.taken > taken:
                taken = self.speaker.taken
                self.announce()
            with suppress(Unavailable):
                self.notice(await self._bus.last_position(Stream.ALLOCATIONS, subject))

    async def publish_oldest(self) -> None:
        event, time = self._ledger.pending[0]
        message = wire.encode(event, time)
        if len(message.body) > wire.LARGEST_BODY:
            log.error("fact too large for the bus", type=type(event).__name__, seq=event.seq, bytes=len(message.body))
            self._ledger.published(event)
            return
        try:
            position = await self.speaker.publish(message)
        except Unavailable as error:
            if self.failures == 0:
                log.warning("bus does not confirm", finding=error.finding, remedy=error.remedy, seq=event.seq)
            self.failures += 1
            self.refusal = error.finding if isinstance(error, BusRefused) else None
            await self._clock.sleep(backoff_seconds(self.failures, FIRST_PAUSE, LONGEST_PAUSE))
            return
        if self.failures:
            log.info("bus confirms again", tries=self.failures, waiting=len(self._ledger.pending))
            self.failures, self.refusal = 0, None
        self._ledger.published(event)
        self.notice(position)

    def notice(self, position: int) -> None:
        """A stream whose positions go back has lost what it held: everything live is said anew."""
        if position < self._position:
            log.warning("the allocation stream went back", had=self._position, got=position)
            self._position = position
            self.announce()
        self._position = max(position, self._position)

    def announce(self) -> None:
        """Says all live allocations anew, where the disk allows."""
        with suppress(StateFault):  # the ledger has said so; the next fact that is lost brings this here again
            self._ledger.announce()
