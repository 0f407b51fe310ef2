"""
What the registries have reserved on this node, for answers to the kubelet's GetPreferredAllocation.

The newest message on the node's subject is the truth (`ReservationsChanged`). It is followed on the bus that everybody
hears. While the bus is away what was heard last counts until its time is over, and a node that hears nothing answers as if
nothing were reserved: a reservation steers a preference, and nothing is given out because of it. But NICs come with GPUs
because of it, so a process that has just begun waits for a moment until it has read what is reserved (`until_read`).
"""

import anyio
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, Unavailable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.ports import Bus, Clock, Received, Stream
from topoalign.core.state.reservations import NodeReservations
from topoalign.runtime.tasks import either

AGAIN_SECONDS = 1.0
"""Between two tries to reach the stream."""
READ_SECONDS = 3.0
"""How long from its start on a process makes the kubelet wait for them: with a bus that is there it takes milliseconds."""

log = structlog.get_logger("topoalign.allocator.reservations")


class Reservations:
    """The reservations of this node."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        """`bus`: the one that everybody hears."""
        self._ledger, self._bus, self._clock = ledger, bus, clock
        self._heard = NodeReservations()
        self._began, self._read = clock.monotonic(), anyio.Event()
        self.unreadable = 0
        """Messages on the subject that are no reservations of this node."""

    def current(self) -> NodeReservations:
        """What is known of them now, with what the node has given since taken into account."""
        if self._heard.reservations:
            self._heard = self._heard.observe(self._ledger.state, own=True)
        return self._heard

    async def until_read(self) -> None:
        """Returns once they have been read, and `READ_SECONDS` after the start at the latest."""
        left = self._began + READ_SECONDS - self._clock.monotonic()
        if left > 0 and not self._read.is_set():
            await either(self._read.wait, lambda: self._clock.sleep(left))

    async def run(self) -> None:
        """Follows the reservations of this node, until cancelled."""
        subject = wire.reservation_subject(self._ledger.node)
        while True:
            try:
                newest = await self._bus.last_position(Stream.ALLOCATIONS, subject)
                break
            except Unavailable as error:
                log.debug("the reservations cannot be read yet", finding=error.finding)
                await self._clock.sleep(AGAIN_SECONDS)
        if not newest:
            self._read.set()
        async with self._bus.follow(Stream.ALLOCATIONS, subject, after=max(0, newest - 1)) as received:
            async for each in received:
                self.take(each)
                if each.position >= newest:
                    self._read.set()

    def take(self, received: Received) -> None:
        """Takes in a message of the subject. One that is no reservation of this node is passed over, and counted."""
        try:
            event = wire.decode(received.message)
        except BadRequest as error:
            self._note_unreadable(error.finding)
            return
        if not isinstance(event, ReservationsChanged) or event.node != self._ledger.node:
            self._note_unreadable(f"{type(event).__name__} of node {event.node!r}")
            return
        live, now = self._ledger.state.allocations.keys(), self._clock.monotonic()
        self._heard = self.current().apply(event, received.position, now, live)

    def _note_unreadable(self, finding: str) -> None:
        self.unreadable += 1
        log.warning(
            "a message about reservations was passed over",
            finding=finding,
            remedy="see who may publish on the node's reservation subject: only registries should",
        )
