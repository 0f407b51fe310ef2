"""
Connections of servers that are called hundreds of times a second: httptools parses what comes, in C.

An answer leaves in one segment: in two, the second could wait 40 ms for the acknowledgement of the first, and wakes whoever
reads it twice. The pages of a process use h11 (`connections`), which bounds the head of a request; here a subclass has to.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from topoalign.runtime.connections import FairConnection

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MOST_PIPELINED = 4
"""Requests of a connection that wait behind the one in work. No client of Kubernetes sends any."""


PART_BYTES = 32 * 1024
"""A body is passed on in parts of at least so many bytes: at the 64 KiB that uvicorn keeps, the peer has to wait."""


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

    def __init__(self, *of_uvicorn: Any, **named: Any) -> None:
        super().__init__(*of_uvicorn, **named)
        self._part_has_come = asyncio.Event()

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the work on its request, as `FairConnection`."""
        super().connection_lost(exc)
        self._part_has_come.set()

    def on_body(self, body: bytes) -> None:
        """A piece of a body has come."""
        super().on_body(body)
        if len(self.cycle.body) >= PART_BYTES:
            self._part_has_come.set()

    def on_message_complete(self) -> None:
        """A whole request has come."""
        super().on_message_complete()
        self._part_has_come.set()

    async def _answer(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        await super()._answer(scope, partial(self._receive_part, self._in_work, receive), send)

    async def _receive_part(self, request: Any, receive: "Receive") -> "Message":
        # A task that wakes for each byte of a slow body costs several times what the parser does.
        while request.more_body and len(request.body) < PART_BYTES and not request.disconnected:
            if request.waiting_for_100_continue:
                break
            self._part_has_come.clear()
            await self._part_has_come.wait()
        return await receive()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._in_work = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The parser reads nothing behind a request for another protocol, so the answer to it is the last one."""
        self.cycle.keep_alive = False
