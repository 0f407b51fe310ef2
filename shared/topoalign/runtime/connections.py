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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from topoalign.runtime.fair_share import OpenConnections, Peer
from topoalign.runtime.request_turns import WORKING, RequestTurns, Working

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from uvicorn import Config
import ssl

MOST = 256
"""Upper bound of open connections. Monitoring and people need a handful."""
PART = 8
"""HTTP uses at most one eighth of the file descriptors that the process may have."""
WRITE_SECONDS = 10.0
"""How long a written answer may wait to be read: Prometheus gives up after the same time."""
PROBES = ("/livez", "/readyz")
"""Prefixes of the paths of a kubelet's probes: the probes of an address have a share of their own."""


class FairConnection(asyncio.Protocol):
    """A mixin for connections of uvicorn that gives each peer its fair share."""

    if TYPE_CHECKING:  # of uvicorn's connection
        config: Config
        transport: asyncio.Transport
        loop: asyncio.AbstractEventLoop
        flow: Any
        connections: Any  # OpenConnections

    cycle: Any = None
    """uvicorn's newest request; None: none has come."""
    peer: Peer = ("",)
    since = 0.0
    """
    As of `fair_share.ServedConnection`, by the clock of the event loop. While a request is in work it may be its
    beginning still.
    """
    has_begun = False
    """Whether bytes of the next request have come."""
    _write_timer: asyncio.TimerHandle | None = None
    _task: "asyncio.Task[Any] | None" = None
    """The peer of the request under way."""
    _working: Working | None = None

    def __init__(self, *of_uvicorn: Any, turns: RequestTurns, **named: Any) -> None:
        """`turns`: those of all servers of the process."""
        super().__init__(*of_uvicorn, **named)
        self._turns = turns
        self.app = self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """
        Accepts the connection; at the limit, one of the peer with the most connections is closed. The peer is charged for
        the time that this takes.
        """
        self.since = self.loop.time()
        self.peer = peer_of(transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # else a little that is unread would be noticed by nobody
        make_room(self.connections)
        self._turns.charge(Working(self.peer, self._turns), self.loop.time() - self.since)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the work on its request."""
        self._stop_write_timer()
        super().connection_lost(exc)
        if (cycle := self.in_work) is not None:
            cycle.disconnected = True
        if self._task is not None and self._working is not None and not self._working.outlives_connection:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Takes received bytes, and notes when the next request begins."""
        if not self.has_begun and (self.cycle is None or self.cycle.response_complete):
            self.has_begun = True
            self._wait_from_now()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self.has_begun = False
        self._wait_from_now()
        super().on_response_complete()  # type: ignore[misc]  # of uvicorn's connection

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

    @property
    def in_work(self) -> Any:
        """uvicorn's request that is answered now; None: none has come."""
        return self.cycle

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
        WORKING.set(self._working)
        with suppress(asyncio.CancelledError):
            await self.flow.drain()
            await self._working.give()
            await self.config.loaded_app(scope, receive, send)

    def _wait_from_now(self) -> None:
        self.since = self.loop.time()
        self.connections.renew(self)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class HttpConnection(FairConnection, H11Protocol):
    """uvicorn's connection with a fair share."""


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
    within = 4.0
    """Seconds for the handshake, as for the head of a request."""

    def __init__(self, http: FairConnection, tls: ssl.SSLContext, turns: RequestTurns) -> None:
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
        """As of `FairConnection`."""
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
