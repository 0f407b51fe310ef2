"""
A limit on the HTTP connections of a process.

Each connection takes a file descriptor, and the process needs others: its journal, the kubelet's socket. So there is a
limit far below that of the system. At the limit, the connection that has been silent longest is closed, and the new one
is served. A probe of /livez therefore succeeds however many other clients hold silent connections.
"""

import asyncio
import resource
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256
"""Monitoring and people need a handful."""
PART = 8
"""Of the file descriptors that the process may have, HTTP keeps no more than one part of so many; as long as new ones come
in faster than old ones close, it takes up to four."""
BACKLOG = 64
"""Connections that may wait to be accepted, at most."""


class Connection(H11Protocol):
    """uvicorn's connection, which makes room for itself."""

    since = 0.0
    """When it was made, by the clock of the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection; at the limit, close the one that has been silent longest."""
        super().connection_made(transport)
        self.since = self.loop.time()
        make_room(self.connections)


def make_room(connections: Iterable[Any]) -> None:
    """Where these connections of a server are more than may be, closes the one that has been silent longest."""
    live = [each for each in connections if not each.transport.is_closing()]
    if len(live) > most():
        silent = [each for each in live if each.cycle is None or each.cycle.response_complete]  # the newest one, too
        min(silent, key=lambda each: each.since).transport.abort()


def most() -> int:
    """Connections that may be open now."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if descriptors == resource.RLIM_INFINITY else max(4, min(MOST, descriptors // PART))


def backlog() -> int:
    """
    Connections that may wait to be accepted.

    asyncio (3.11) accepts as many in one go, before any of them can be closed again, and tries as often when it has no
    descriptor left.
    """
    return min(BACKLOG, most())
