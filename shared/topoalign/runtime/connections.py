"""
Bounds what one peer can take of the HTTP servers of a process: connections, memory and time (`fair_share`).

Each connection takes a file descriptor, and the process needs others: its journal, the kubelet's socket. So there is a
limit far below that of the system. At the limit the peer with the most connections gives one up, and the new one is served:
a probe of /livez succeeds however many connections other clients hold, and in whatever state.

A connection has one request in work. The next one begins when its turn comes, once the answer before it has been handed to
the system; a peer that does not read its answer is closed after `WRITE_SECONDS`. A request whose connection is lost is not
worked on any more.
"""

import asyncio
import resource
import ssl
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from topoalign.runtime.fair_share import OpenConnections, Peer
from topoalign.runtime.request_turns import WORKING, RequestTurns, Working

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MOST = 256
"""Upper bound of open connections. Monitoring and people need a handful."""
PART = 8
"""HTTP uses at most one eighth of the file descriptors that the process may have."""
WRITE_SECONDS = 10.0
"""How long a written answer may wait to be read: Prometheus gives up after the same time."""
HEAD_SECONDS = 4.0
"""How long the head of a request may take, from its first byte."""
MOST_HEAD_BYTES = 64 * 1024
"""Of the head of a request, its address and its headers, with the trailers; and of the framing of a body in chunks."""
MOST_PIPELINED = 4
"""Requests of a connection that wait behind the one in work. No client of Kubernetes sends any."""
PART_BYTES = 32 * 1024
"""A body is passed on in parts of at least so many bytes: at the 64 KiB that uvicorn keeps, the peer has to wait."""
PROBES = ("/livez", "/readyz")
"""Prefixes of the paths of a kubelet's probes: the probes of an address have a share of their own."""


class HttpConnection(HttpToolsProtocol):
    """
    A connection of uvicorn with its peer's fair share, with limits on the head of a request, and with errors in JSON.

    A request whose head is not complete in time is answered and ended.
    """

    connections: Any  # OpenConnections
    peer: Peer = ("",)
    since = 0.0
    """When the server began to wait for the peer, by the loop's clock. During a request it may be its beginning."""
    has_begun = False
    """Whether bytes of the next request have come."""
    in_work: Any = None
    """uvicorn's request that is answered now; None: none has come. The parser reads on behind it."""
    _write_timer: asyncio.TimerHandle | None = None
    _task: "asyncio.Task[Any] | None" = None
    _working: Working | None = None

    head_seconds = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None
    _is_idle = True
    """Whether nothing of a request has come after the last one."""
    _head_is_complete = True
    """Whether the head of a request has come, or nothing of it."""
    _is_first = True
    """Whether no request has begun in what has come since the connection was idle."""
    _is_refused = False
    """Whether the request is answered already, as its head is too long."""
    _head_bytes = 0
    """Of the address and the headers that were read, and of the trailers behind a body."""
    _raw_bytes = _body_bytes = 0
    """What has come of the request, and what of it is its body."""

    def __init__(self, *of_uvicorn: Any, turns: RequestTurns, **named: Any) -> None:
        """`turns`: those of all servers of the process."""
        super().__init__(*of_uvicorn, **named)
        self._turns = turns
        self.app = self._answer
        self._part_has_come = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accepts the connection, closes another at the limit, and charges the peer for the time of this."""
        self.since = self.loop.time()
        self.peer = peer_of(transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # else a little that is unread would be noticed by nobody
        make_room(self.connections)
        self._turns.charge(Working(self.peer, self._turns), self.loop.time() - self.since)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the work on its request."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        if self.in_work is not None:
            self.in_work.disconnected = True
        if self._task is not None and self._working is not None and not self._working.outlives_connection:
            self._task.cancel()
        self._part_has_come.set()

    def data_received(self, data: bytes) -> None:
        """Takes bytes. A head must end in time, and what is no body must not exceed the limit of a head."""
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
            self._refuse()  # as chunks with long extensions, or with a byte each

    def on_message_begin(self) -> None:
        """A request has begun. Raises ValueError, which ends the connection, where too many wait for their turn."""
        if not self._is_first:  # it came together with the one before; lines without text may come before the first
            self._begin_request()
        self._is_first = False
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests on one connection")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address has come."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer has come."""
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self._head_is_complete = True
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._body_bytes += len(body)
        if self._is_refused:
            return
        super().on_body(body)
        if len(self.cycle.body) >= PART_BYTES:
            self._part_has_come.set()

    def on_message_complete(self) -> None:
        """A whole request has come."""
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
        """Starts the time-out of `WRITE_SECONDS` for a peer that has not read all of the answer."""
        super().pause_writing()
        self._wait_from_now()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.end)

    def resume_writing(self) -> None:
        """Stops the time-out once the peer has read the answer."""
        self._stop_write_timer()
        self._wait_from_now()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP."""
        self._end_with(400, "BadRequest", msg.rstrip("."))

    def is_waited_for(self) -> bool:
        """Whether the server waits for the peer: to send a request, or to read an answer."""
        cycle = self.in_work
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def end(self) -> None:
        """Closes the connection at once."""
        self.connections.discard(self)
        self.transport.abort()

    async def _answer(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Runs the application in the request's turn, once the peer has read the last answer."""
        peer = (*self.peer, "probe") if scope["path"].startswith(PROBES) else self.peer
        self._working = Working(peer, self._turns)
        self._task = asyncio.current_task()
        receive = partial(self._receive_part, self.in_work, receive)
        WORKING.set(self._working)
        with suppress(asyncio.CancelledError):
            await self.flow.drain()
            await self._working.give()
            await self.config.loaded_app(scope, receive, send)

    async def _receive_part(self, request: Any, receive: "Receive") -> "Message":
        # A task that wakes for each byte of a slow body costs several times what the parser does.
        while request.more_body and len(request.body) < PART_BYTES and not request.disconnected:
            if request.waiting_for_100_continue:
                break
            self._part_has_come.clear()
            await self._part_has_come.wait()
        return await receive()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.in_work = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The parser reads nothing behind a request for another protocol, so the answer to it is the last one."""
        if self.cycle is not None:  # a refused head has none
            self.cycle.keep_alive = False

    def _begin_request(self) -> None:
        self._is_idle = self._head_is_complete = False
        self._head_bytes = self._raw_bytes = self._body_bytes = 0

    def _end_slow_head(self) -> None:
        self._end_with(408, "TooSlow", f"the head of a request did not come within {self.head_seconds:g} s")

    def _refuse(self) -> None:
        """Answers a request whose head is too long, and passes on nothing more of it."""
        self._is_refused = True
        self._end_with(431, "TooLarge", f"the head of a request has more than {MOST_HEAD_BYTES} bytes")

    def _end_with(self, status: int, code: str, finding: str) -> None:
        """Answers with an error, and closes, if the connection is not ending anyway."""
        if self.transport.is_closing():
            return
        if self.in_work is not None and self.in_work.response_started and not self.in_work.response_complete:
            self.end()  # the client would read the error as a part of the answer before
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
    """Closes a connection of a server if there are more than allowed."""
    if len(connections) > most():
        connections.first_to_close().end()


def most() -> int:
    """Connections that may be open now."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if descriptors == resource.RLIM_INFINITY else max(4, min(MOST, descriptors // PART))


HANDSHAKE_SECONDS = 0.002
"""Time for the keys of a handshake. It is charged at once, because the work is done when parts of the handshake arrive."""


class Handshake(asyncio.Protocol):
    """
    Handles a connection until the end of its TLS handshake, then passes it to `http`.

    asyncio alone shows a connection only after its handshake, for which a client may take a minute: connections without one
    would not be counted, and could use up all file descriptors. So here a handshake counts, and takes a turn.
    """

    transport: asyncio.Transport
    within = HEAD_SECONDS

    def __init__(self, http: HttpConnection, tls: ssl.SSLContext, turns: RequestTurns) -> None:
        self._http = http
        self._tls = tls
        self._turns = turns
        self._connections = http.connections
        self._early: list[bytes] = []
        """Bytes of the first request that came together with the end of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection, and waits for its turn."""
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
        """As of `HttpConnection`."""
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
