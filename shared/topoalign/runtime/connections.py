"""
Limits the connections, the memory and the time that one peer can use in the HTTP servers of a process (`fair_share`).

Each connection uses a file descriptor, and the process needs descriptors for other things, such as its journal and the
kubelet's socket. So the limit on connections is far below the system's limit on file descriptors. At the limit, the
server closes a connection of the peer with the most connections and serves the new one. So a probe of /livez succeeds,
regardless of how many connections other clients have open and which state they are in.

A connection processes one request at a time. The next request begins in its turn, after the previous response has been
passed to the system. If a peer does not read its response, the connection is closed after `WRITE_SECONDS`. If a
connection is lost, its request is cancelled, unless it called `outlive_connection`.
"""

import asyncio
import resource
import ssl
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from topoalign.runtime.fair_share import OpenConnections, Peer
from topoalign.runtime.request_turns import WORKING, RequestTurns, Working

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MOST = 256
"""Maximum number of open connections. Monitoring and operators need only a few."""
PART = 8
"""HTTP uses at most one eighth of the file descriptors that the process can open."""
WRITE_SECONDS = 10.0
"""How long a peer can take to read a written response: as long as Prometheus' default time-out of a scrape."""
HEAD_SECONDS = 4.0
"""Time-out of the head of a request, from its first byte."""
MOST_HEAD_BYTES = 64 * 1024
"""Maximum size of the URL, the headers and the trailers of a request. It also limits the framing of a chunked body."""
MOST_PIPELINED = 4
"""Maximum number of pipelined requests that wait on one connection. Kubernetes clients do not pipeline requests."""
PART_BYTES = 32 * 1024
"""Minimum size of the parts of a body, except the last one. uvicorn stops reading at 64 KiB."""
PART_SECONDS = 1.0
"""How long a request waits for the first part of its body before it occupies the application."""
PROBES = ("/livez", "/readyz")
"""Path prefixes of the kubelet's probes. The probes from an address have their own fair share."""


class HttpConnection(HttpToolsProtocol):
    """
    An HTTP connection of uvicorn with fair sharing among peers, limits on the head of a request, and errors in JSON.

    If the head of a request is not complete in time, the connection responds with an error and closes.
    """

    connections: Any  # OpenConnections
    peer: Peer = ("",)
    since = 0.0
    """When the server began to wait for the peer, by the event loop's clock. During a request, it can be its start."""
    has_begun = False
    """Whether bytes of the next request have arrived."""
    in_work: Any = None
    """The current or the last request, as uvicorn's cycle; None: no request yet. The parser can be ahead of it."""
    _write_timer: asyncio.TimerHandle | None = None
    _task: "asyncio.Task[Any] | None" = None
    _working: Working | None = None

    head_seconds = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None
    _is_idle = True
    """Whether nothing has arrived since the end of the last request."""
    _head_is_complete = True
    """Whether the head of the request is complete, or nothing of it has arrived."""
    _is_first = True
    """Whether no request has begun since the connection was idle."""
    _is_refused = False
    """Whether the request was answered with an error because its head is too long."""
    _head_bytes = 0
    """Bytes of the URL, the headers and the trailers that have arrived."""
    _raw_bytes = _body_bytes = 0
    """Bytes of the request that have arrived, and those of its body."""

    def __init__(self, *of_uvicorn: Any, turns: RequestTurns, **named: Any) -> None:
        """`turns`: shared by all servers of the process."""
        super().__init__(*of_uvicorn, **named)
        self._turns = turns
        self._part_has_come = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Accepts the connection, closes another one at the limit, and charges the peer for the time this takes."""
        self.since = self.loop.time()
        self.peer = peer_of(transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # otherwise a short unread response would not be noticed
        make_room(self.connections)
        self._turns.charge(Working(self.peer, self._turns), self.loop.time() - self.since)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the request in progress, unless it outlives the connection."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self.in_work is not None:
            self.in_work.disconnected = True
        if self._task is not None and self._working is not None and not self._working.outlives_connection:
            self._task.cancel()
        self._part_has_come.set()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]  # no reference cycle is left of requests that have not begun

    def data_received(self, data: bytes) -> None:
        """Receives bytes. Limits the time for the head, and the size of everything except the body."""
        if self._is_idle:
            self._begin_request()
            self._is_first = True
        self._raw_bytes += len(data)
        if not self.has_begun and (self.cycle is None or self.cycle.response_complete):
            self.has_begun = True
            self._wait_from_now()
        super().data_received(data)
        if self._head_is_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._end_slow_head)
        if not self._is_idle and self._raw_bytes - self._body_bytes > MOST_HEAD_BYTES + self._body_bytes:
            self._refuse()  # such as chunks with long extensions, or chunks of one byte

    def on_message_begin(self) -> None:
        """Begins a request. Raises ValueError, which closes the connection, if too many requests wait on it."""
        if not self._is_first:  # it arrived together with the previous one; empty lines can precede the first
            self._begin_request()
        self._is_first = False
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests on one connection")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Receives a part of the URL."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receives a header or a trailer."""
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Receives the end of the head."""
        self._head_is_complete = True
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receives a part of the body."""
        self._body_bytes += len(body)
        if self._is_refused:
            return
        super().on_body(body)
        if len(self.cycle.body) >= PART_BYTES:
            self._part_has_come.set()

    def on_message_complete(self) -> None:
        """Receives the end of a request."""
        self._is_idle = True
        if self._is_refused:
            return
        super().on_message_complete()
        self._part_has_come.set()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self.has_begun = False
        self._wait_from_now()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the time-out of `WRITE_SECONDS` for a peer that has not read the whole response."""
        super().pause_writing()
        self._wait_from_now()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.end)

    def resume_writing(self) -> None:
        """Stops the time-out after the peer has read the response."""
        self._stop_write_timer()
        self._wait_from_now()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Responds with an error to data that is not HTTP."""
        self._end_with(400, "BadRequest", msg.rstrip("."))

    def is_waited_for(self) -> bool:
        """Whether the server waits for the peer to send a request or to read a response."""
        cycle = self.in_work
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def end(self) -> None:
        """Closes the connection at once."""
        self.connections.discard(self)
        self.transport.abort()

    async def _answer(self, request: Any, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Runs the application in the turn of the request, after the peer has read the previous response."""
        peer = (*self.peer, "probe") if scope["path"].startswith(PROBES) else self.peer
        self._working = Working(peer, self._turns)
        self._task = asyncio.current_task()
        receive = partial(self._receive_part, request, receive)
        WORKING.set(self._working)
        with suppress(asyncio.CancelledError):
            await self.flow.drain()
            with anyio.move_on_after(PART_SECONDS):
                await self._wait_for_part(request)
            await self._working.give()
            await self.config.loaded_app(scope, receive, send)

    async def _receive_part(self, request: Any, receive: "Receive") -> "Message":
        await self._wait_for_part(request)
        return await receive()

    async def _wait_for_part(self, request: Any) -> None:
        # Waking the task for each byte of a slow body would cost several times as much as parsing it.
        while request.more_body and len(request.body) < PART_BYTES and not request.disconnected:
            if request.waiting_for_100_continue:
                break
            self._part_has_come.clear()
            await self._part_has_come.wait()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.in_work = cycle
        super()._start_asgi_task(cycle, partial(self._answer, cycle))

    def _unsupported_upgrade_warning(self) -> None:
        """Closes the connection after the response, because the parser reads nothing after an upgrade request."""
        if self.cycle is not None:  # a refused head has no cycle
            self.cycle.keep_alive = False

    def _begin_request(self) -> None:
        self._is_idle = self._head_is_complete = False
        self._head_bytes = self._raw_bytes = self._body_bytes = 0

    def _end_slow_head(self) -> None:
        self._end_with(408, "TooSlow", f"the head of a request did not come within {self.head_seconds:g} s")

    def _refuse(self) -> None:
        """Responds with an error to a request whose head is too long, and ignores the rest of the request."""
        self._is_refused = True
        self._end_with(431, "TooLarge", f"the head of a request has more than {MOST_HEAD_BYTES} bytes")

    def _end_with(self, status: int, code: str, finding: str) -> None:
        """Responds with an error and closes the connection, unless it is already closing."""
        if self.transport.is_closing():
            return
        if self.in_work is not None and self.in_work.response_started and not self.in_work.response_complete:
            self.end()  # the client would read the error as a part of the previous response
            return
        body = msgspec.json.encode({"code": code, "finding": finding, "remedy": "send a whole HTTP/1.1 request"})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _wait_from_now(self) -> None:
        self.since = self.loop.time()
        self.connections.renew(self)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """The peer that made a connection."""
    address = transport.get_extra_info("peername")
    return (address[0] if address else "",)


def make_room(connections: OpenConnections[Any]) -> None:
    """Closes one of these connections if there are more than `most()`."""
    if len(connections) > most():
        connections.first_to_close().end()


def most() -> int:
    """Maximum number of open connections, by the current limit on file descriptors."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if descriptors == resource.RLIM_INFINITY else max(4, min(MOST, descriptors // PART))


HANDSHAKE_SECONDS = 0.002
"""CPU time of a handshake's cryptography. It is charged in advance, because the work is done when data arrives."""


class Handshake(asyncio.Protocol):
    """
    Handles a connection until the end of its TLS handshake, then passes it to `http`.

    asyncio reports a connection only after its handshake, which can take a client a minute. Connections in a handshake
    would not be counted and could use up all file descriptors. So this class counts a connection from its start, and a
    handshake waits for its turn.
    """

    transport: asyncio.Transport
    within = HEAD_SECONDS

    def __init__(self, http: HttpConnection, tls: ssl.SSLContext, turns: RequestTurns) -> None:
        self._http = http
        self._tls = tls
        self._turns = turns
        self._connections = http.connections
        self._early: list[bytes] = []
        """Bytes of the first request that arrived together with the end of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection and starts the handshake in its turn."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()
        self.peer = peer_of(transport)
        self.since = self._http.loop.time()
        self._connections.add(self)
        make_room(self._connections)
        self._task = self._http.loop.create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        """Keeps a part of the first request."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        self._connections.discard(self)
        self._task.cancel()

    def is_waited_for(self) -> bool:
        """Always true: see `HttpConnection`."""
        return True

    def end(self) -> None:
        """Closes the connection at once."""
        self._connections.discard(self)
        self.transport.abort()

    def shutdown(self) -> None:
        """Closes the connection when the server ends."""
        self.end()

    async def _shake_hands(self) -> None:
        working = Working(self.peer, self._turns)
        with suppress(asyncio.CancelledError):
            await working.give()
            self._turns.charge(working, HANDSHAKE_SECONDS)
            try:
                secured = await self._http.loop.start_tls(
                    self.transport, self, self._tls, server_side=True, ssl_handshake_timeout=self.within
                )
            except OSError:  # no TLS, or not in time
                self.end()
                return
            self._connections.discard(self)
            if secured is not None:
                secured.set_protocol(self._http)
                self._http.connection_made(secured)
                for each in self._early:
                    self._http.data_received(each)
