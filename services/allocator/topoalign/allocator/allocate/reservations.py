"""
What the registries have reserved on this node, for answers to the kubelet's GetPreferredAllocation.

The newest message on the node's subject is the truth (`ReservationsChanged`). It is followed on the bus that everybody
hears. While the bus is away what was received last counts until its time is over, and a node that hears nothing answers
as if nothing were reserved: a reservation steers a preference, and nothing is given out because of it. But NICs come
with GPUs because of it, so a process that has just begun waits for a moment until it has read what is reserved
(`until_read`).

A registry reserves what the node has confirmed, and binds the pod: the kubelet may ask about it before this process, on a
busy node, has received the reservation. So for a while after a confirmation the stream is asked first what its newest
message is, and that one is waited for.
"""

from contextlib import suppress

import anyio
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, Unavailable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.ports import Bus, Clock, Received, Stream
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.runtime.tasks import either

AGAIN_SECONDS = 1.0
"""Between two tries to reach the stream."""
READ_SECONDS = 3.0
"""How long from its start on a process makes the kubelet wait for them: with a bus that is there it takes milliseconds."""

EXPECTED_SECONDS = 10.0
"""After a confirmation, in which the kubelet may ask about a reservation that is not received: a bind has four."""
RECEIVE_SECONDS = 1.0
"""How long the kubelet waits for it then; it takes less than a millisecond where the node is not busy."""

log = structlog.get_logger("topoalign.allocator.allocate.reservations")


class Reservations:
    """The reservations of this node."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        """`bus`: the one that everybody hears."""
        self._ledger = ledger
        self._bus = bus
        self._clock = clock
        self._newest = NodeReservations()
        self._observed: NodeState | None = None
        """The state that shows nothing more of them: one call of the kubelet asks for them a dozen times."""
        self._began = clock.monotonic()
        self._read = anyio.Event()
        self._expected_until = self._began
        """Monotonic seconds: until then there may be a reservation that matters and was not received."""
        self._position = 0
        self._more = anyio.Event()
        """Of the newest message that was received, and what is set by the next one."""
        self.unreadable = 0
        """Messages on the subject that are no reservations of this node."""

    def current(self) -> NodeReservations:
        """What is known of them now, with what the node has given since taken into account."""
        state = self._ledger.state
        if self._newest.reservations and state is not self._observed:
            before = self._newest
            self._newest = self._newest.observe(state, self._ledger.endings.origins, own=True)
            self._observed = state if self._newest is before else None
        return self._newest

    def expect(self) -> None:
        """The node has confirmed what it would give a pod: a registry is about to reserve it."""
        self._expected_until = self._clock.monotonic() + EXPECTED_SECONDS

    async def until_read(self) -> None:
        """
        Returns once they have been read, and `READ_SECONDS` after the start at the latest; where one is expected, once all
        are received that there are now, after `RECEIVE_SECONDS` at the latest.
        """
        left = self._began + READ_SECONDS - self._clock.monotonic()
        if left > 0 and not self._read.is_set():
            await either(self._read.wait, lambda: self._clock.sleep(left))
        elif self._clock.monotonic() < self._expected_until:
            await either(self._until_newest, lambda: self._clock.sleep(RECEIVE_SECONDS))

    async def _until_newest(self) -> None:
        """Returns once the newest message of the stream is received, or where the stream does not answer."""
        with suppress(Unavailable, BadRequest):
            newest = await self._bus.last_position(Stream.RESERVATIONS, wire.reservation_subject(self._ledger.node))
            while self._position < newest:
                await self._more.wait()

    async def run(self) -> None:
        """Follows the reservations of this node, until cancelled."""
        subject = wire.reservation_subject(self._ledger.node)
        while True:
            try:
                newest = await self._bus.last_position(Stream.RESERVATIONS, subject)
                break
            except Unavailable as error:
                log.debug("the reservations cannot be read yet", finding=error.finding)
                await self._clock.sleep(AGAIN_SECONDS)
        if not newest:
            self._read.set()
        async with self._bus.follow(Stream.RESERVATIONS, subject, after=max(0, newest - 1)) as received:
            async for each in received:
                self.take(each)
                self._position = each.position
                self._more.set()
                self._more = anyio.Event()
                if each.position >= newest:
                    self._read.set()

    def take(self, received: Received) -> None:
        """Takes in a message of the subject. One that is no reservation of this node is passed over, and counted."""
        try:
            event = wire.decode_event(received.message)
        except BadRequest as error:
            self._note_unreadable(error.finding)
            return
        if not isinstance(event, ReservationsChanged) or event.node != self._ledger.node:
            self._note_unreadable(f"{type(event).__name__} of node {event.node!r}")
            return
        live = self._ledger.state.allocations.keys()
        now = self._clock.monotonic()
        self._newest = self.current().apply(event, received.position, now, live)
        self._observed = None

    def _note_unreadable(self, finding: str) -> None:
        self.unreadable += 1
        log.warning(
            "a message about reservations was passed over",
            finding=finding,
            remedy="see who may publish on the node's reservation subject: only registries should",
        )
