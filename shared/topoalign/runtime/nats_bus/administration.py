"""The administrative step: creates and changes the stores at a server."""

from topoalign.runtime import stores
from topoalign.runtime.nats_bus.access import Access, addresses
from topoalign.runtime.nats_bus.connection import open_connection

NAME = "topoalign-stores"


async def apply_stores(url: str, access: Access = Access(), replicas: int | None = None) -> list[str]:  # noqa: B008  # frozen
    """
    Creates the stores that are missing and changes those that differ; returns a line for each change.

    Raises what `stores.apply` and `open_connection` do.
    """
    connection = await open_connection(addresses(url), NAME, access)
    try:
        return await stores.apply(connection.api, replicas)
    finally:
        await connection.close()
