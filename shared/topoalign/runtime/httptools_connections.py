"""
Connections of servers that are called hundreds of times a second: httptools parses what comes, in C.

The pages of a process go without (`connections`): what asks for them comes seldom, and a node agent saves the memory.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from topoalign.runtime.connections import make_room


class HttpToolsConnection(HttpToolsProtocol):
    """As `Connection`, by another parser."""

    since = 0.0
    """When it was made, by the clock of the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection; at the limit, close the one that has been silent longest."""
        super().connection_made(transport)
        self.since = self.loop.time()
        make_room(self.connections)
