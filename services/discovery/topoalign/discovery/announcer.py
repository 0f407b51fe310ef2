"""
Publishes the newest topology and health on the bus, and retries until they are confirmed (`runtime.publisher`).

The services of the same process receive each message at once. So they learn of a failed GPU, or of a MIG instance for
which a container waits, even if the connection to the bus is slow.

Only the newest topology and health matter, so at most one message of each kind waits. A published message can be lost
or replaced in the stream in three cases: the stream is lost or rolled back; another machine uses this node's name by
mistake and publishes before its agent is refused; a message is forged. So the stream is checked every few seconds and
before each publication. If its newest message is another one, everything is published again.
"""

import asyncio
from collections.abc import Callable, Sequence

import anyio
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest, Published
from topoalign.core.ports import Bus, Clock, Endpoint, Message, Stream
from topoalign.runtime.clock import until_tick
from topoalign.runtime.fact_publisher import FactPublisher
from topoalign.runtime.publisher import Confirmed, Publisher
from topoalign.runtime.replies import answer_with

POLL_SECONDS = 10.0
"""Seconds between two checks whether the newest message in the stream is still the one published here."""

log = structlog.get_logger("topoalign.discovery")


class Announcer:
    """Publishes the newest message of each subject."""

    def __init__(self, hub: Bus, clock: Clock, near: Bus | None = None) -> None:
        """`hub` is the bus shared by all nodes; `near`, if there is one, is the bus inside this process."""
        self.facts = FactPublisher(hub)
        self.publisher = Publisher(self, self._publish, clock)
        self._hub = hub
        self._clock = clock
        self._near = near
        self._waiting: dict[str, Message] = {}
        self._news = anyio.Event()
        self._unsent: asyncio.Queue[Message] = asyncio.Queue()
        """Messages that are not yet published on `near`."""
        self._positions: dict[str, int] = {}
        self._is_contested = False
        """Whether another client had published for this node at the last check."""
        self._missed_other = False
        """Whether this node has replaced a message of another client since the last check."""
        self._published: dict[str, Published] = {}
        """`topology` and `health` -> the newest message to publish."""
        self._announce_due = False
        """Whether everything is published again at the next check, whatever the stream contains."""

    def contested_by(self) -> str | None:
        """For /readyz?verbose: that another client publishes for this node; None: no other client does."""
        if not self._is_contested:
            return None
        return "another process publishes the hardware of this node: does another machine have its name?"

    def endpoint(self, node: NodeName) -> Endpoint:
        """The endpoint that returns what was published. A forged message may have its number, but not its digest."""

        async def published(request: NodeRequest) -> dict[str, Published]:
            if request.node != node:
                raise InvalidField("node", f"this is the discovery service of {node}", "ask that node's own")
            return self._published

        return Endpoint(
            name="published",
            subject=wire.discovery_subject(node, "published"),
            answer=answer_with(NodeRequest, published),
        )

    def request_announce(self) -> None:
        """Publishes everything again at the next check, because others may have used the current numbers."""
        self._announce_due = True

    def submit(self, event: TopologyDiscovered | DeviceHealthChanged) -> None:
        """Queues this event for publication, in place of an earlier one of its kind that is still waiting."""
        message = wire.encode_event(event, self._clock.wall())
        self._waiting[message.subject] = message
        if self._near is not None:
            self._unsent.put_nowait(message)
        kind = "topology" if isinstance(event, TopologyDiscovered) else "health"
        self._published[kind] = Published(
            epoch=event.epoch, revision=event.revision, digest=wire.body_digest(message.body)
        )
        self._news.set()

    async def run(self) -> None:
        """Publishes messages until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self._near is not None:
                tasks.start_soon(self._publish_near, self._near)
            tasks.start_soon(self.publisher.run)

    async def _publish_near(self, near: Bus) -> None:
        while True:
            await near.publish(await self._unsent.get())

    def due(self) -> Sequence[Message]:
        """The newest waiting message of each subject."""
        return list(self._waiting.values())

    def confirm(self, confirmed: Sequence[Confirmed]) -> None:
        """Records that the bus has these messages. A newer message of the same subject still waits."""
        for message, position in confirmed:
            self._positions[message.subject] = position
            if self._waiting.get(message.subject) is message:
                del self._waiting[message.subject]

    async def wait(self) -> None:
        """Waits for a newer message."""
        await self._news.wait()
        self._news = anyio.Event()

    async def _publish(self, message: Message) -> int:
        await self._check_before(message.subject)
        return await self.facts.publish(message)

    async def _check_before(self, subject: str) -> None:
        """Records that another client has published a newer message, which this node is about to replace."""
        position = self._positions.get(subject)
        if position is not None and await self._hub.last_position(Stream.NODES, subject) > position:
            self._missed_other = True

    async def watch(self, announce_all: Callable[[], None]) -> None:
        """Calls `announce_all` whenever the stream has lost the published messages, or has newer ones of another client."""
        while True:
            await self._clock.sleep(until_tick(self._clock, POLL_SECONDS))
            try:
                beyond = await self._beyond()
            except Unavailable:
                continue
            if min(beyond, default=0) < 0:
                log.warning("the stream of nodes has lost messages of this node")
            others = max(beyond, default=0) > 0 or self._missed_other
            if others and not self._is_contested:
                log.warning(
                    "another process has published the hardware of this node: it is published again",
                    remedy="give each machine a name of its own (TOPOALIGN_NODE), and see who may publish on the node's "
                    "subjects; while a new version takes over, nothing",
                )
            self._is_contested = others
            self._missed_other = False
            owed = self._announce_due
            self._announce_due = False
            if others or owed or any(beyond):
                self._positions.clear()
                announce_all()

    async def _beyond(self) -> list[int]:
        """Returns, per subject, how many positions the stream is ahead of this node's message. Raises Unavailable."""
        found: list[int] = []
        for subject, position in list(self._positions.items()):
            last = await self._hub.last_position(Stream.NODES, subject)
            changed_meanwhile = subject in self._waiting or self._positions[subject] != position
            if not changed_meanwhile:
                found.append(last - position)
        return found
