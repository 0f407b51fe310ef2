"""
Keeps the reservations of all nodes. Receives them from all registries, and writes them by compare-and-set.

The newest message of a node's subject has all reservations of the node (`core.state.node_reservations`). A change is
published with the position of the message that it is based on. If another registry has written in the meantime, the
stream refuses the change. Then the newest message is read, and the caller decides again (`BusConflict`). Changes of
several nodes are one atomic batch: all of them are stored, or none. A late message never replaces a newer one.

A reservation ends when the node reports the reserved devices, when it expires, or when it is cancelled. Every registry
detects the first two cases itself. They are written with the next change of the node. If there is no change, the
registry that wrote the newest message writes them within a second, or another registry some seconds later.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from secrets import token_hex

import anyio
import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import BusConflict, BusRefused, BusUnavailable, IdTaken, NotFound, Undecodable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Bus, Clock, Message, Received, Stream
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, in_order_of_binds


class ReservationsByNode(dict[NodeName, NodeReservations]):
    """Node -> its reservations, with an index of the nodes of each pod. Change it only by item assignment or `drop`."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, frozenset[NodeName]] = {}
        """UID of a pod -> the nodes with its reservations; several after attempts on several nodes."""

    def __setitem__(self, node: NodeName, known: NodeReservations) -> None:
        self._note(node, known.until)
        super().__setitem__(node, known)

    def drop(self, node: NodeName) -> None:
        """Removes a node."""
        if node in self:
            self._note(node, ())
            del self[node]

    def nodes_of(self, uid: str) -> frozenset[NodeName]:
        """Returns the nodes with a reservation of this pod, including ended reservations."""
        return self._nodes.get(uid, frozenset())

    def _note(self, node: NodeName, uids: Collection[str]) -> None:
        before = self[node].until.keys() if node in self else frozenset[str]()
        for uid in before - frozenset(uids):
            if others := self._nodes.pop(uid) - {node}:
                self._nodes[uid] = others
        for uid in frozenset(uids) - before:
            self._nodes[uid] = self.nodes_of(uid) | {node}


TIDY_SECONDS = 1.0
"""Time between two checks for ended reservations."""
OTHERS_SECONDS = 5.0
"""Delay before a registry writes ended reservations of a node if another registry wrote the newest message."""
PAUSE = 0.05
"""Seconds before a message is published again if the result is unknown, and before a failed read is repeated."""

log = structlog.get_logger("topoalign.registry.scheduling")


class ReservationChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the reservations of one node."""

    node: NodeName
    position: int
    """Position of the message that the change is based on (`NodeReservations.position`)."""
    made: tuple[Reservation, ...] = ()
    """New reservations. They replace reservations of the same pods."""
    cancelled: tuple[str, ...] = ()
    """UIDs of pods whose reservations end."""


class ClusterReservations:
    """The reservations of all nodes that this registry knows. `run` keeps them up to date."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        writer: str,
        facts: Callable[[NodeName], NodeState],
        changed: Callable[[NodeName], None] = lambda node: None,
        freed: Callable[[NodeName], None] = lambda node: None,
        has_gone: Callable[[NodeName], bool] = lambda node: False,
    ) -> None:
        """
        `writer`: unique ID of this replica. `facts`: returns the state of a node; raises NotFound. `changed` is called
        with each node whose reservations have changed. `freed` is called with each node on which this registry ended a
        reservation that no pod used. `has_gone`: whether a node no longer exists.
        """
        self.writer = writer
        self.epoch = int(clock.wall() * 1000)
        self.counts: Counter[str] = Counter()
        """Reservations that this registry wrote as `made`, `consumed`, `expired` and `cancelled`; its `conflicts`."""
        self._bus = bus
        self._clock = clock
        self._facts = facts
        self._changed = changed
        self._freed = freed
        self._has_gone = has_gone
        self._known = ReservationsByNode()
        self._seq = 0
        """Number of the last change of any node. All nodes share it, so no ID is reused if a forgotten node returns."""
        self._ended: dict[NodeName, float] = {}
        """Node -> monotonic seconds at which a reservation of its newest message ended."""
        self._read = False

    def behind(self) -> str | None:
        """Readiness: why the reservations are not known yet; None: they are known."""
        return None if self._read else "the reservations are not read yet"

    def of(self, node: NodeName) -> NodeReservations:
        """The known reservations of a node, including ended ones."""
        return self._known.get(node) or NodeReservations()

    def held(self, node: NodeName) -> tuple[Reservation, ...]:
        """The reservations that are valid on a node now."""
        return self.of(node).held(self._clock.monotonic())

    def of_pod(self, uid: str) -> dict[NodeName, Reservation]:
        """Node -> the pod's reservation on it. There are several only after attempts on several nodes."""
        now = self._clock.monotonic()
        return {
            node: each
            for node in sorted(self._known.nodes_of(uid))  # in the same order in every registry
            for each in self.of(node).held(now)
            if each.pod_uid == uid
        }

    def pods(self) -> dict[str, tuple[str, str]]:
        """UID of each reserved pod -> its namespace and name."""
        now = self._clock.monotonic()
        return {each.pod_uid: (each.namespace, each.pod) for known in self._known.values() for each in known.held(now)}

    def of_gang(self, gang: str) -> dict[str, NodeName]:
        """UID of each reserved pod of this gang -> the node with its reservation."""
        now = self._clock.monotonic()
        return {
            each.pod_uid: node for node, known in self._known.items() for each in known.held(now) if each.gang == gang
        }

    def observe(self, node: NodeName) -> None:
        """Updates the reservations of a node after a new fact of the node."""
        known = self._known.get(node)
        if known is None or not known.reservations:
            return
        with suppress(NotFound):
            seen = known.observe(self._facts(node))
            if seen is not known:
                self._known[node] = seen
                self._changed(node)

    def forget(self, node: NodeName, *, although_reserved: bool = False) -> None:
        """Removes a deleted node, unless it has reservations. If the node returns, its first change conflicts."""
        if although_reserved or not self.of(node).reservations:
            self._known.drop(node)

    async def write(self, changes: Sequence[ReservationChange]) -> None:
        """
        Publishes either all of these changes or none, and returns after they are stored. Raises BusRefused. If a change
        is not based on the newest message, reads the newest messages and raises BusConflict.
        """
        events = [self._event(change) for change in changes]
        batch = [
            (wire.encode_event(event, self._clock.wall()), change.position)
            for event, change in zip(events, changes, strict=True)
        ]
        try:
            positions = await self._publish(batch)
        except BusConflict:
            self.counts["conflicts"] += 1
            for change in changes:
                await self.refresh(change.node)
            raise
        for event, position in zip(events, positions, strict=True):
            for how in ("made", "consumed", "expired", "cancelled"):
                self.counts[how] += len(getattr(event, how))
            if position > self.of(event.node).position:
                self._apply(event, position)
            if event.expired or event.cancelled:
                self._freed(event.node)

    async def cancel(self, uid: str, nodes: Collection[NodeName] | None = None) -> None:
        """Ends the reservations of this pod on these nodes; None: on all nodes. Raises BusRefused."""
        while reserved := [node for node in self.of_pod(uid) if nodes is None or node in nodes]:
            with suppress(BusConflict):
                await self.write(
                    [
                        ReservationChange(node=node, position=self.of(node).position, cancelled=(uid,))
                        for node in reserved
                    ]
                )

    async def refresh(self, node: NodeName) -> None:
        """
        Reads the newest message of a node, and reads again if another message arrives in the meantime. Waits until the
        bus is available. Raises BusRefused.
        """
        while True:
            before = self.of(node).position
            try:
                received = await self._bus.newest(Stream.RESERVATIONS, wire.reservation_subject(node))
                if self.of(node).position == before:
                    break
            except BusUnavailable:
                await self._clock.sleep(PAUSE)
        if received is None:  # the stream was lost: the next change writes the known state again
            self._known[node] = msgspec.structs.replace(self.of(node), position=0)
        elif received.position != self.of(node).position:
            self._take(node, received)

    async def run(self) -> None:
        """Follows the reservations of all nodes and writes ended reservations, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            while True:
                await self._clock.sleep(TIDY_SECONDS)
                for node in [node for node, known in self._known.items() if known.reservations]:
                    with suppress(BusConflict, BusRefused):
                        await self._tidy(node)

    async def _publish(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        while True:
            try:
                if len(batch) == 1:
                    return [await self._bus.publish(*batch[0])]
                return await self._bus.publish_batch(batch)
            except BusUnavailable:
                await self._clock.sleep(PAUSE)
            except IdTaken:
                mark = token_hex(8)
                batch = [(wire.with_message_mark(message, mark), expected) for message, expected in batch]

    def _event(self, change: ReservationChange) -> ReservationsChanged:
        """Returns the event with the node's reservations after a change."""
        known = self.of(change.node)
        now = self._clock.monotonic()
        self._seq += 1
        ended = known.ended(now)
        return ReservationsChanged(
            node=change.node,
            epoch=self.epoch,
            writer=self.writer,
            seq=self._seq,
            reservations=in_order_of_binds(known.held(now), change.made, change.cancelled),
            made=tuple(each.pod_uid for each in change.made),
            consumed=ended.consumed,
            expired=ended.expired,
            cancelled=tuple(uid for uid in change.cancelled if uid not in (*ended.consumed, *ended.expired)),
        )

    async def _follow(self) -> None:
        while True:
            try:
                end = await self._bus.last_position(Stream.RESERVATIONS, wire.reservation_subject())
                break
            except (BusUnavailable, BusRefused):
                await self._clock.sleep(TIDY_SECONDS)
        last = 0
        past: dict[NodeName, Received] = {}  # node -> its newest message, until all stored messages are read
        self._read = not end
        async with self._bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                if received.position <= last:  # the stream was lost or rolled back: no known position is valid
                    for node, known in self._known.items():
                        self._known[node] = msgspec.structs.replace(known, position=0)
                last = received.position
                try:
                    past[wire.decode_node_token(received.message.subject.rpartition(".")[2])] = received
                except Undecodable as error:
                    log.warning("reservations cannot be read", position=received.position, finding=error.finding)
                if self._read or received.position >= end:
                    for node, newest in past.items():
                        if newest.position > self.of(node).position:
                            self._take(node, newest)
                    past = {}
                    self._read = True

    def _take(self, node: NodeName, received: Received) -> None:
        """Applies the newest message of a node. If it is unreadable, changes only the position for the next write."""
        try:
            event = wire.decode_event(received.message)
        except (Undecodable, wire.UnknownEvent) as error:
            log.warning("reservations cannot be read", position=received.position, finding=error.finding)
            self._known[node] = msgspec.structs.replace(self.of(node), position=received.position)
            self._changed(node)
            return
        if isinstance(event, ReservationsChanged):
            self._apply(event, received.position)

    def _apply(self, event: ReservationsChanged, position: int) -> None:
        node = event.node
        known = self.of(event.node)
        if (event.writer, event.epoch) == (self.writer, self.epoch):
            self._seq = max(event.seq, self._seq)
        self._known[node] = known.apply(event, position, self._clock.monotonic())
        self._ended.pop(node, None)
        with suppress(NotFound):
            self._known[node] = self._known[node].observe(self._facts(node))
        if self._has_gone(node):
            self.forget(node)
        self._changed(node)

    async def _tidy(self, node: NodeName) -> None:
        """Writes the ended reservations of a node, if this registry is responsible."""
        known = self.of(node)
        now = self._clock.monotonic()
        ended = known.ended(now)
        if not ended.consumed and not ended.expired:
            return
        if node not in self._ended:
            self._ended[node] = now
            self._changed(node)
        own = known.newest is not None and known.newest.writer == self.writer
        if own or now >= self._ended[node] + OTHERS_SECONDS:
            await self.write([ReservationChange(node=node, position=known.position)])
