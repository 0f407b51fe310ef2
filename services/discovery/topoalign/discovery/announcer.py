"""
Publishes the newest topology and health on the bus, and retries until they are confirmed (`runtime.publisher`).

The services of the same process are told at once: a GPU that fails, and a MIG instance for which a container waits, need no
bus that is there and quick.

Only the newest topology and health matter, so at most one message of each kind waits. Three events can replace it in the
stream: the stream was lost or rolled back; another machine uses this node's name by mistake and has published before its
agent was refused; a message was forged. So the stream is checked every few seconds and before each publication, and if it
has another message, everything is published again.
"""

from collections.abc import Callable, Sequence

import anyio
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import Published, PublishedRequest
from topoalign.core.ports import Bus, Clock, Endpoint, Message, Stream
from topoalign.runtime.answers import answering
from topoalign.runtime.clock import until_tick
from topoalign.runtime.publisher import Confirmed, Publisher
from topoalign.runtime.speaker import FactPublisher

POLL_SECONDS = 10.0
"""Between two looks at whether what was said is still the newest that the stream has."""

log = structlog.get_logger("topoalign.discovery")


class Announcer:
    """Publishes the newest message of each subject."""

    def __init__(self, hub: Bus, clock: Clock, near: Bus | None = None) -> None:
        """`hub` is the bus that everybody hears; `near` that of this process alone, where there is one beside it."""
        self.speaker = FactPublisher(hub, clock)
        self.publisher = Publisher(self, self._publish, clock)
        self._hub = hub
        self._clock = clock
        self._near = near
        self._waiting: dict[str, Message] = {}
        self._unsent: list[Message] = []
        """What the services of this process have not been told yet."""
        self._news = anyio.Event()
        self._near_news = anyio.Event()
        self._positions: dict[str, int] = {}
        self._spoken_over = False
        """Whether somebody else had said something of this node at the last look."""
        self._overheard = False
        """Whether somebody else had, since that look, before this node spoke again."""
        self._said: dict[str, Published] = {}
        """`topology` and `health` -> the newest that was to be said."""
        self._owed = False
        """Whether everything is to be said anew at the next look, whatever the stream has."""

    def spoken_over(self) -> str | None:
        """For /readyz?verbose: who else speaks for this node."""
        if not self._spoken_over:
            return None
        return "another process says what the hardware of this node is: does another machine have its name?"

    def endpoint(self, node: NodeName) -> Endpoint:
        """Answers SaidRequest. Two readings may have the same number, one of them forged: only their content tells."""

        async def said(request: PublishedRequest) -> dict[str, Published]:
            if request.node != node:
                raise InvalidField("node", f"this is the discovery service of {node}", "ask that node's own")
            return self._said

        return Endpoint(name="said", subject=wire.published_subject(node), answer=answering(PublishedRequest, said))

    def owe(self) -> None:
        """Everything is said anew at the next look: what is said now may have numbers that others have used."""
        self._owed = True

    def say(self, event: TopologyDiscovered | DeviceHealthChanged) -> None:
        """Publish this message in the place of an earlier one of its kind that still waits."""
        message = wire.encode_event(event, self._clock.wall())
        self._waiting[message.subject] = message
        if self._near is not None:
            self._unsent.append(message)
            self._near_news.set()
        kind = "topology" if isinstance(event, TopologyDiscovered) else "health"
        self._said[kind] = Published(epoch=event.epoch, revision=event.revision, digest=wire.body_digest(message.body))
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self._near is not None:
                tasks.start_soon(self._tell_near, self._near)
            tasks.start_soon(self.publisher.run)

    async def _tell_near(self, near: Bus) -> None:
        """Tells the services of this process whatever is said, in its order."""
        while True:
            unsent = self._unsent
            self._unsent = []
            for message in unsent:
                await near.publish(message)
            if not self._unsent:
                await self._near_news.wait()
                self._near_news = anyio.Event()

    def due(self) -> Sequence[Message]:
        """The newest message of each subject that waits."""
        return list(self._waiting.values())

    def confirm(self, confirmed: Sequence[Confirmed]) -> None:
        """The bus has these messages; a newer one of the same subject waits on."""
        for message, position in confirmed:
            self._positions[message.subject] = position
            if self._waiting.get(message.subject) is message:
                del self._waiting[message.subject]

    async def wait(self) -> None:
        """Until there is a newer message."""
        await self._news.wait()
        self._news = anyio.Event()

    async def _publish(self, message: Message) -> int:
        """Tries once, after a look at what the stream has. Raises Unavailable."""
        await self._look_before(message.subject)
        return await self.speaker.publish(message)

    async def _look_before(self, subject: str) -> None:
        """What others have said is not the newest any more once this node has spoken, and could not be noticed then."""
        position = self._positions.get(subject)
        if position is not None and await self._hub.last_position(Stream.NODES, subject) > position:
            self._overheard = True

    async def watch(self, say_anew: Callable[[], None]) -> None:
        """Calls `say_anew` whenever the stream has lost what was said, or has something newer that others said."""
        while True:
            await self._clock.sleep(until_tick(self._clock, POLL_SECONDS))
            try:
                beyond = await self._beyond()
            except Unavailable:
                continue
            if min(beyond, default=0) < 0:
                log.warning("the stream of nodes has lost what was said")
            others = max(beyond, default=0) > 0 or self._overheard
            if others and not self._spoken_over:
                log.warning(
                    "another process has said what the hardware of this node is: it is said anew",
                    remedy="give each machine a name of its own (TOPOALIGN_NODE), and see who may publish on the node's "
                    "subjects; while a new version takes over, nothing",
                )
            self._spoken_over = others
            self._overheard = False
            owed = self._owed
            self._owed = False
            if others or owed or any(beyond):
                self._positions.clear()
                say_anew()

    async def _beyond(self) -> list[int]:
        """
        For each subject, by how much the newest position in the stream is beyond that of what was said. Raises Unavailable.
        """
        found: list[int] = []
        for subject, position in list(self._positions.items()):
            last = await self._hub.last_position(Stream.NODES, subject)
            said_since = subject in self._waiting or self._positions[subject] != position
            if not said_since:
                found.append(last - position)
        return found
