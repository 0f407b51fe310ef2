"""
`NodeBus`: the bus of a node agent, whose services share a process and reach one another with or without NATS.

Messages that concern only the node stay in the process: its own topology and health are delivered at once, and a
request to a service of this process is answered here. All messages go to NATS as well. So a node that starts before its
hub, or without one, discovers its hardware and allocates; the hub receives the messages later.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from topoalign.core import wire
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Endpoint, Message, Received, Stream
from topoalign.runtime.memory_bus import MemoryBus


class NodeBus:
    """The bus of a node agent: the hub's bus, with messages of this node delivered locally first."""

    def __init__(self, hub: Bus, node: NodeName) -> None:
        self.hub = hub
        self._local = MemoryBus()
        self._own = wire.encode_node_token(node)

    @property
    def near(self) -> Bus:
        """The bus of this process alone, which receives what concerns the node whether or not the hub answers."""
        return self._local

    @property
    def connected(self) -> bool:
        """Whether the hub is connected."""
        return self.hub.connected

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """As the hub does; a message of this node's hardware is delivered in the process first. Raises as the hub."""
        if expected_last is None and self._is_own(message.subject):
            await self._local.publish(message)
        return await self.hub.publish(message, expected_last)

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """As `Bus.publish_batch` of the hub, because only the hub stores batches."""
        return await self.hub.publish_batch(batch)

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """As the hub answers; for this node's hardware, as the process answers."""
        bus = self._local if stream is Stream.NODES and self._is_own(subject) else self.hub
        return await bus.newest(stream, subject)

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """As `publish` each of them, in this order, many under way at once. Returns what the hub returns."""
        for message in messages:
            if self._is_own(message.subject):
                await self._local.publish(message)
        return await self.hub.publish_all(messages)

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """Facts about this node's hardware come from this process, under its own positions; all else from the hub."""
        bus = self._local if stream is Stream.NODES and self._is_own(subject) else self.hub
        return bus.follow(stream, subject, after)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """As the hub answers; for this node's hardware, as the process answers."""
        bus = self._local if stream is Stream.NODES and self._is_own(subject) else self.hub
        return await bus.last_position(stream, subject)

    async def forget(self, stream: Stream, subject: str) -> None:
        """Delete the messages on a subject, in the process and at the hub."""
        await self._local.forget(stream, subject)
        await self.hub.forget(stream, subject)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """The answer of a service of this process if one serves the subject, else of the hub."""
        bus = self._local if self._local.answers(subject) else self.hub
        return await bus.ask(subject, body, within)

    @asynccontextmanager
    async def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
        """Answer these endpoints in the process and at the hub."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._local.serve(service, endpoints))
            await stack.enter_async_context(self.hub.serve(service, endpoints))
            yield

    def _is_own(self, subject: str) -> bool:
        """`topoalign.v1.<kind>.<this node>`: topology, health and usage; allocations have one token more."""
        return subject.startswith(f"{wire.PREFIX}.") and subject.split(".")[3:] == [self._own]
