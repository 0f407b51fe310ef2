"""
Publishes what the journal has and the bus has not, in the journal's order and for as long as it takes.

Nothing waits for this: the kubelet has its answer before the first try.

Where the stream has another message under the id of a fact, the fact goes out under another id, and soon afterwards
everything live is said anew: listeners may have believed that message.
"""

from collections.abc import Sequence
from contextlib import suppress

import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.events import LedgerEvent
from topoalign.core.ports import Bus, Clock, Message, Stream
from topoalign.runtime.publisher import Publisher
from topoalign.runtime.speaker import Speaker

POLL_SECONDS = 60.0
"""Between two checks whether the stream still has what was said."""

log = structlog.get_logger("topoalign.allocator.ledger.outbox")


class Outbox:
    """Publishes the ledger's pending facts to the bus, oldest first, one at a time."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger, self._bus, self._clock = ledger, bus, clock
        self.speaker = Speaker(bus, clock)
        self.publisher = Publisher(self, self.speaker.publish, clock)
        self._position = 0
        self._oldest: LedgerEvent | None = None
        """The fact of the message that is due."""

    async def run(self) -> None:
        """Publishes until cancelled, and retries while the bus is away."""
        await self.publisher.run()

    async def watch(self) -> None:
        """
        Checks every `POLL_SECONDS` whether the stream still has what was said: an idle node would not notice otherwise.
        Announces everything anew where somebody else published under ids of this node since the last check.
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

    def due(self) -> Sequence[Message]:
        """The message to publish next: that of the oldest pending fact. A fact that is too large for the bus is skipped."""
        while self._ledger.pending:
            self._oldest, time = self._ledger.pending[0]
            message = wire.encode(self._oldest, time)
            if len(message.body) <= wire.LARGEST_BODY:
                return [message]
            name, seq = type(self._oldest).__name__, self._oldest.seq
            log.error("fact too large for the bus", type=name, seq=seq, bytes=len(message.body))
            self._ledger.published(self._oldest)
        return []

    def confirm(self, message: Message, position: int) -> None:
        """Removes the oldest fact from `pending`: the bus has stored it at this position of the stream."""
        if self._oldest is not None:
            self._ledger.published(self._oldest)
        self.notice(position)

    async def wait(self) -> None:
        """Waits until the ledger has a fact to publish, or has recorded something more."""
        if not self._ledger.pending:
            await self._ledger.wait_past(self._ledger.version)

    def notice(self, position: int) -> None:
        """Takes note of a stream position. One below the last has lost what it held: everything live is announced anew."""
        if position < self._position:
            log.warning("the allocation stream went back", had=self._position, got=position)
            self._position = position
            self.announce()
        self._position = max(position, self._position)

    def announce(self) -> None:
        """Publishes a snapshot of all live allocations; nothing where the disk refuses it."""
        with suppress(StateFault):  # the ledger has said so; the next fact that is lost brings this here again
            self._ledger.announce()
