"""Makes a client over NATS."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from topoalign.client.subscriber import Client
from topoalign.runtime.nats_bus import Access, connect_bus


@asynccontextmanager
async def connect(
    url: str,
    *,
    name: str = "subscriber",
    wait: float | None = 10.0,
    access: Access = Access(),  # noqa: B008  # frozen
) -> AsyncIterator[Client]:
    """A client over NATS while the context is open. Raises what `topoalign.runtime.nats_bus.connect_bus` does."""
    async with connect_bus(url, name=name, wait=wait, access=access) as bus:
        yield Client(bus, name=name)
