"""
Receives the reservations that registries publish for this node. The answers to the kubelet depend on them.

The newest `ReservationsChanged` event of the node replaces all earlier ones and is valid until its reservations expire.
Reservations determine preferences and co-allocated NICs. So after the start of the process, the kubelet's calls wait
until the reservations are read. A registry publishes a reservation after the node has confirmed it. So for some seconds
after a confirmation, the kubelet's calls wait for the newest message of the stream (`until_read`).
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
from topoalign.runtime.tasks import wait_for_first

AGAIN_SECONDS = 1.0
"""Time between two attempts to read the stream."""
READ_SECONDS = 3.0
"""Maximum wait of the kubelet's calls for reservations after the start. If the bus works, it takes milliseconds."""

EXPECTED_SECONDS = 10.0
"""Maximum time from a confirmation to the arrival of the reservation. A bind takes at most four seconds."""
RECEIVE_SECONDS = 1.0
"""Maximum wait of a kubelet's call for that reservation. On an idle node it takes less than a millisecond."""

log = structlog.get_logger("topoalign.allocator.allocate.node_reservations")


class NodeReservationList:
    """Receives and stores the reservations of this node."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        """`bus`: the bus shared by all nodes."""
        self._ledger = ledger
        self._bus = bus
        self._clock = clock
        self._newest = NodeReservations()
        self._observed: NodeState | None = None
        """Cache key: the state with which `_newest` was computed. A kubelet call reads the reservations 12 times."""
        self._began = clock.monotonic()
        self._read = anyio.Event()
        self._expected_until = self._began
        """Monotonic seconds until which a reservation may still arrive."""
        self._position = 0
        self._more = anyio.Event()
        """`_position`: the position of the newest received message. `_more`: set when the next message arrives."""
        self.unreadable = 0
        """Number of messages on the node's subject that are not reservations of this node."""

    def current(self) -> NodeReservations:
        """Returns the received reservations, updated with the allocations of the node."""
        state = self._ledger.state
        if self._newest.reservations and state is not self._observed:
            before = self._newest
            self._newest = self._newest.observe(state, self._ledger.release_log.origins, own=True)
            self._observed = state if self._newest is before else None
        return self._newest

    def expect(self) -> None:
        """Notes that a prediction was confirmed and that a registry is about to publish a reservation."""
        self._expected_until = self._clock.monotonic() + EXPECTED_SECONDS

    async def until_read(self) -> None:
        """Waits a short time for reservations that may exist but are not received yet."""
        left = self._began + READ_SECONDS - self._clock.monotonic()
        if left > 0 and not self._read.is_set():
            await wait_for_first(self._read.wait, lambda: self._clock.sleep(left))
        elif self._clock.monotonic() < self._expected_until:
            await wait_for_first(self._until_newest, lambda: self._clock.sleep(RECEIVE_SECONDS))

    async def _until_newest(self) -> None:
        with suppress(Unavailable, BadRequest):
            newest = await self._bus.last_position(Stream.RESERVATIONS, wire.reservation_subject(self._ledger.node))
            while self._position < newest:
                await self._more.wait()

    async def run(self) -> None:
        """Receives the reservations of this node until cancelled."""
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
        """Applies a message from the node's subject. Ignores and counts it if it is not a reservation of this node."""
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
            "a message about reservations was ignored",
            finding=finding,
            remedy="check which clients may publish on the node's reservation subject: only registries should",
        )
