"""
`NodeBus`: the bus of a node agent, whose services share a process and reach one another with or without NATS.

The node's own topology, health and usage are delivered within the process at once, and also published on NATS. A
request to a service of this process is answered in the process. So a node that starts before its hub, or without one,
discovers its hardware and allocates; the hub receives the facts later.
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
        """The bus within this process: it receives messages about the node even if the hub does not respond."""
        return self._local

    @property
    def connected(self) -> bool:
        """Whether the hub is connected."""
        return self.hub.connected

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """Publishes on the hub, and first in the process if it is about this node's hardware. Raises like the hub."""
        if expected_last is None and self._is_own(message.subject):
            await self._local.publish(message)
        return await self.hub.publish(message, expected_last)

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """As `Bus.publish_batch` of the hub, because only the hub stores batches."""
        return await self.hub.publish_batch(batch)

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """From the hub; for this node's hardware, from this process."""
        return await self._bus_of(stream, subject).newest(stream, subject)

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """Publishes each message as `publish` does, in this order, many in flight. Returns what the hub returns."""
        for message in messages:
            if self._is_own(message.subject):
                await self._local.publish(message)
        return await self.hub.publish_all(messages)

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """Facts about this node's hardware come from this process, with its own positions; all others from the hub."""
        return self._bus_of(stream, subject).follow(stream, subject, after)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """From the hub; for this node's hardware, from this process."""
        return await self._bus_of(stream, subject).last_position(stream, subject)

    async def forget(self, stream: Stream, subject: str) -> None:
        """Deletes the messages on a subject, in the process and at the hub."""
        await self._local.forget(stream, subject)
        await self.hub.forget(stream, subject)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """The response of a service of this process if one serves the subject, otherwise of the hub."""
        bus = self._local if self._local.answers(subject) else self.hub
        return await bus.ask(subject, body, within)

    @asynccontextmanager
    async def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
        """Serves these endpoints in the process and at the hub."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._local.serve(service, endpoints))
            await stack.enter_async_context(self.hub.serve(service, endpoints))
            yield

    def _bus_of(self, stream: Stream, subject: str) -> Bus:
        return self._local if stream is Stream.NODES and self._is_own(subject) else self.hub

    def _is_own(self, subject: str) -> bool:
        """`topoalign.v1.<kind>.<this node>`: topology, health and usage; allocations have one token more."""
        return subject.startswith(f"{wire.PREFIX}.") and subject.split(".")[3:] == [self._own]
