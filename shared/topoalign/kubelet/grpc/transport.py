"""
Serves gRPC on a unix socket to untrusted peers.

grpclib implements the protocol; this module adds the protection. A connection of another user is closed before a byte
is read. At the limit of connections, the process with the most connections loses the one that has been silent longest.
A request that exceeds its size limit ends with RESOURCE_EXHAUSTED while it is still arriving, one that cannot be
decoded with INVALID_ARGUMENT, and one for an unknown method with UNIMPLEMENTED. A large request is decoded in turns. A
stop waits for running calls.

docs/decisions/0027-grpclib-and-its-limits.md compares this with grpclib alone.
"""

import os
import socket
from asyncio import get_running_loop
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import Any, cast

import anyio
import grpclib.server
import structlog
from betterproto2 import Message
from betterproto2.grpclib import ServiceBase
from grpclib import events
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from topoalign.core.model.errors import BadRequest, NoFit, TopoalignError, clean
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.arriving import LARGEST_REQUEST, SMALL_REQUEST, Arriving
from topoalign.kubelet.grpc.decoding import NAMING, Decoding, ServerCodec
from topoalign.kubelet.grpc.grpc_connection import CHUNK, PING_SECONDS, CallConnection, GrpcConnection
from topoalign.kubelet.grpc.turns import TurnQueue

MOST_CONNECTIONS = 32
"""Connections at a time. The kubelet needs one."""

ACCEPTED_AT_ONCE = 4
"""Connections that are accepted in one iteration of the event loop: about a millisecond of work."""

TURNS_TO_ACCEPT = 4
"""Iterations of the event loop until the connection that was accepted last has its transport and is rejected."""

LONGEST_MESSAGE = 1_000
"""Maximum length of a status message in characters. It is sent as a header, and clients limit the size of headers."""

KEEPALIVE = Configuration(
    _keepalive_time=PING_SECONDS,
    _keepalive_timeout=3600.0,  # `look` decides: grpclib would not read what arrived while this process was stopped
    _keepalive_permit_without_calls=True,
    _http2_max_pings_without_data=0,
    _http2_min_sent_ping_interval_without_data=PING_SECONDS / 2,
    http2_stream_window_size=2**16 - 1,
)
"""
Pings a silent peer as long as it is connected; grpclib's default is to ping after two hours, twice. The window of a
stream is 64 KiB, so that calls that read nothing do not use up the 4 MiB window of the connection.
"""

STATUS = {BadRequest: Status.INVALID_ARGUMENT, NoFit: Status.FAILED_PRECONDITION}
"""Error -> gRPC status. All other errors are the machine's fault: UNAVAILABLE."""

Method = Callable[[Any], Awaitable[None]]

CALL: ContextVar[Any] = ContextVar("CALL", default=None)
"""The stream (of grpclib's protocol) of the call that a task answers."""


def caller() -> GrpcConnection | None:
    """The connection of the call that is being answered; None outside of one."""
    stream = CALL.get()
    return None if stream is None else cast(CallConnection, stream.connection).ours()


class Servicer(ServiceBase):
    """A mixin before a generated service base: counts its calls, and answers their errors as gRPC statuses."""

    calls = 0
    """Unary calls under way. Streams do not count: the server ends them."""

    idle: anyio.Event | None = None
    """Set when the last of them ends, if a task waits for that."""

    def __mapping__(self) -> dict[str, Handler]:
        generated = super().__mapping__()  # type: ignore[misc]  # of the generated base that follows in the MRO
        return {path: handler._replace(func=self.guarded(handler)) for path, handler in generated.items()}

    def guarded(self, handler: Handler) -> Method:
        """The method of a handler, which also counts the call and converts errors to gRPC statuses."""

        async def call(stream: Any) -> None:
            CALL.set(stream._stream)
            unary = handler.cardinality is Cardinality.UNARY_UNARY
            self.calls += unary
            try:
                await answer_call(handler.func, stream)
            finally:
                self.calls -= unary
                if self.idle is not None and not self.calls:
                    self.idle.set()

        return call

    def favours(self, connection: GrpcConnection) -> bool:
        """Whether this connection is closed last to make room for another."""
        return False

    async def drained(self) -> None:
        """Waits until no unary call is under way."""
        if self.calls:
            self.idle = anyio.Event()
            await self.idle.wait()

    async def _call_rpc_handler_server_stream(
        self, handler: Callable[[Any], AsyncIterator[Any]], stream: Any, request: Any
    ) -> None:
        """As in the generated code, but the generator is closed with the stream, not when it is garbage-collected."""
        async with aclosing(cast(AsyncGenerator[Any, None], handler(request))) as messages:
            async for message in messages:
                await stream.send_message(message)


async def answer_call(method: Method, stream: Any) -> None:
    """Answers one call; its errors become gRPC statuses."""
    try:
        await method(stream)
    except TopoalignError as error:
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), Status.UNAVAILABLE)
        raise GRPCError(status, clean(f"{error.code}: {error.finding}; {error.remedy}", LONGEST_MESSAGE)) from error
    except AssertionError as error:
        # grpclib and the generated code assert that a complete request has arrived
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended early") from error
    except NotImplementedError as error:
        raise GRPCError(
            Status.UNIMPLEMENTED, "compressed requests are not understood: send them as they are"
        ) from error


async def no_such_method(stream: Any) -> None:
    """The handler for unknown methods. Raises GRPCError UNIMPLEMENTED."""
    raise GRPCError(Status.UNIMPLEMENTED, "there is no such method here")


NO_SUCH_METHOD = Handler(no_such_method, Cardinality.UNARY_UNARY, Message, Message)


class Methods(dict[str, Handler]):
    """
    Path -> method of a server, and a handler for unknown paths. grpclib's own answer for these has no content type, so
    clients report it as a transport error.
    """

    def get(self, path: str, default: Any = None) -> Handler:
        """The handler of a path, never None."""
        return super().get(path, NO_SUCH_METHOD)


class Load:
    """The state that all sockets of a process share: turns of connections, and the limit on the size of requests."""

    def __init__(self) -> None:
        self.turns = TurnQueue()
        self.arriving = Arriving()


class GrpcServer(grpclib.server.Server):
    """Serves one `Servicer` on one unix socket to processes of root and of this process' user. Can be started once."""

    mode = 0o600
    """The mode of the socket."""
    guard: Path | None = None
    """The directory that is locked while the socket is created. None: the socket's directory."""

    def __init__(self, servicer: Servicer, path: Path, field: str, load: Load | None = None) -> None:
        """`field`: the setting that the path came from, for errors. `load`: shared with others; None: not shared."""
        super().__init__([servicer], codec=ServerCodec(), config=KEEPALIVE)
        self._mapping = self._methods = Methods(self._mapping)
        events.listen(self, events.RecvMessage, self.received)
        self.servicer = servicer
        self.path = path
        self.field = field
        self.identity: unix_sockets.Identity | None = None
        self._listening: socket.socket | None = None
        self.connections: set[GrpcConnection] = set()
        self.draining = False
        load = load or Load()
        self.turns = load.turns
        self.arriving = load.arriving
        self.chunk = memoryview(bytearray(CHUNK))
        """The buffer that all connections read into; its content is copied at once."""
        self.complaints = Complaints(path.name)

    async def listen(self) -> None:
        """Binds the socket and serves. Raises the errors of `unix_sockets.listen_on_path`."""
        listening = unix_sockets.listen_on_path(self.path, self.field, self.mode, self.guard)
        self.identity = unix_sockets.identity(self.path)
        self._listening = listening
        await self.start(sock=listening, backlog=ACCEPTED_AT_ONCE)
        listening.listen(unix_sockets.BACKLOG)  # asyncio uses `backlog` for both the queue and the accepts at once

    @property
    def in_place(self) -> bool:
        """Whether the socket is still the one at its path."""
        return self.identity is not None and unix_sockets.identity(self.path) == self.identity

    async def stop(self, within: float) -> None:
        """Accepts no new connections, waits up to `within` s for running calls, then closes. Must not be cancelled."""
        self.draining = True
        unix_sockets.remove_socket(self.path, self.identity)
        self.identity = None
        with anyio.move_on_after(within, shield=True):
            await self.servicer.drained()
        if self._server is not None and self._listening is not None:
            # asyncio 3.11 leaks an accepted connection if the server is closed before the connection has a transport.
            get_running_loop().remove_reader(self._listening)
            for _ in range(TURNS_TO_ACCEPT):
                await anyio.lowlevel.cancel_shielded_checkpoint()
            self._listening = None
            self.close()
            for connection in tuple(self.connections):
                connection.close("stopping")
            with anyio.move_on_after(within, shield=True):
                await self.wait_closed()

    def admits(self, connection: GrpcConnection) -> bool:
        """Registers a connection if its peer may connect. Returns whether it may."""
        connection.peer = who = unix_sockets.peer(connection.transport.get_extra_info("socket"))
        if self.draining:
            return False
        if not self.is_welcome(who):
            self.complaints.report("connection refused", f"peer runs as uid {who.uid}", pid=who.pid)
            return False
        if len(self.connections) >= MOST_CONNECTIONS:
            self.make_room()
        self.connections.add(connection)
        return True

    def is_welcome(self, peer: unix_sockets.Peer) -> bool:
        """Whether this process may connect."""
        return peer.uid in (0, os.geteuid())

    def make_room(self, most: int = MOST_CONNECTIONS) -> None:
        """Closes the longest silent connection of the process with the most connections; a favoured one last."""
        held = Counter(each.peer.pid for each in self.connections)
        longest = min(
            self.connections, key=lambda each: (self.servicer.favours(each), -held[each.peer.pid], each.spoke)
        )
        self.complaints.report("connection closed", f"more than {most} connections", pid=longest.peer.pid)
        longest.hang_up("others need its place")

    def largest(self, headers: Iterable[Sequence[str | bytes]]) -> int:
        """Maximum size in bytes of a request with these headers."""
        path = next((str(value) for name, value in headers if name == ":path"), "")
        return LARGEST_REQUEST if self._methods.get(path).request_type in NAMING else SMALL_REQUEST

    async def received(self, event: events.RecvMessage) -> None:
        """Called by grpclib before a request is handed to its method."""
        stream = CALL.get()
        connection = caller()
        assert connection is not None
        if isinstance(decoding := event.message, Decoding):
            message = None
            while message is None:
                await self.turns.turn(connection)
                message = decoding.step()
            event.message = message
        self.arriving.take(stream)

    def _protocol_factory(self) -> GrpcConnection:
        """Replaces grpclib's connection class; grpclib has no other hook for this."""
        plain = super()._protocol_factory()
        connection = GrpcConnection(plain.handler, plain.config, plain.h2_config)
        connection.server = self
        return connection


AGAIN_SECONDS = 60.0
MOST_CAUSES = 64
"""Causes that are distinguished at a time."""

log = structlog.get_logger()


class Complaints:
    """Logs errors of the peers of one socket, each cause once a minute. So a flood causes only one log entry."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._logged: dict[tuple[str, str], float] = {}
        """Event and reason -> when they were logged within the last minute, in monotonic seconds."""

    def report(self, event: str, reason: str, **details: Any) -> bool:
        """Logs an error, unless the same was logged within the last minute. Returns whether it was logged."""
        now = monotonic()
        self._logged = {cause: when for cause, when in self._logged.items() if now < when + AGAIN_SECONDS}
        if (event, reason) in self._logged or len(self._logged) >= MOST_CAUSES:
            return False
        self._logged[event, reason] = now
        log.warning(event, reason=reason, socket=self._socket, **details)
        return True
