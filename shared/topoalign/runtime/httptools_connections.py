"""
Connections of servers that are called hundreds of times a second: httptools parses what comes, in C.

An answer leaves in one segment: in two, the second could wait 40 ms for the acknowledgement of the first, and wakes whoever
reads it twice. The pages of a process go without (`connections`): what asks for them comes seldom, and a node agent saves
the memory.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from topoalign.runtime.connections import FairConnection

MOST_PIPELINED = 4
"""Requests of a connection that wait behind the one in work. No client of Kubernetes sends any."""


class OneSegment:
    """A transport that sends all that is written in one turn of the loop at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send this with what else is written in this turn."""
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        """Send what is written, then close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written = b"".join(self._written)
        self._written.clear()
        if written and not self._transport.is_closing():
            self._transport.write(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpToolsConnection(FairConnection, HttpToolsProtocol):
    """A connection as `HttpConnection`, with another parser."""

    _in_work: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection, as `FairConnection`."""
        super().connection_made(OneSegment(transport, self.loop))  # type: ignore[arg-type]  # it has what is used

    @property
    def in_work(self) -> Any:
        """As of `FairConnection`: this parser reads on behind a request that is not answered."""
        return self._in_work

    def on_message_begin(self) -> None:
        """A request has begun. Raises ValueError, which ends the connection, where too many wait for their turn."""
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests on one connection")
        super().on_message_begin()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._in_work = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The parser reads nothing behind a request for another protocol, so the answer to it is the last one."""
        self.cycle.keep_alive = False
