"""
A gRPC server on a unix socket that can be left alone with whoever connects.

grpclib carries the protocol; this adds what it leaves to its user. A peer of another user, or one connection too many, is
closed before a byte is read. A request that grows past `LARGEST_REQUEST` ends with RESOURCE_EXHAUSTED while it is still
arriving, one that cannot be decoded with INVALID_ARGUMENT, and one for a method that is not there with UNIMPLEMENTED.
A large one is decoded in a thread, because it may take seconds. Errors become gRPC statuses in one place, `answered`. A
client that answers no pings is hung up on. A stream's generator is closed when its client goes, and stopping lets the calls
that have begun end first.
"""

import os
import socket
from asyncio import BaseTransport, TimerHandle, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
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
from grpclib.protocol import H2Protocol

from topoalign.allocator.kubelet import sockets
from topoalign.allocator.kubelet.codec import QuickCodec, decoded
from topoalign.core.errors import BadRequest, NoFit, TopoalignError, clean

log = structlog.get_logger()

LARGEST_REQUEST = 4 * 2**20
"""Bytes; what Go's gRPC takes by default, and the ids of 60,000 devices."""

MOST_CONNECTIONS = 64
"""At a time. The kubelet needs one."""

LONGEST_MESSAGE = 1_000
"""Characters of a status message: it travels as a header, which clients bound."""

PING_SECONDS = 10.0
SILENT_LOOKS = 3
"""So often in a row, `PING_SECONDS` apart, nothing may have come of a peer before it is hung up on."""

KEEPALIVE = Configuration(
    _keepalive_time=PING_SECONDS,
    _keepalive_timeout=3600.0,  # ours to judge: grpclib hangs up without reading what came while this process was stopped
    _keepalive_permit_without_calls=True,
    _http2_max_pings_without_data=0,
    _http2_min_sent_ping_interval_without_data=PING_SECONDS / 2,
)
"""Pings a silent peer for as long as it is there. grpclib's own: after two hours, twice."""

STATUS = {BadRequest: Status.INVALID_ARGUMENT, NoFit: Status.FAILED_PRECONDITION}
"""Whose fault it is, in gRPC's words; all else is the machine's: UNAVAILABLE."""

Method = Callable[[Any], Awaitable[None]]


class Servicer(ServiceBase):
    """Mixed in before a generated service base: its calls are counted, guarded and answered as above."""

    calls = 0
    """Unary calls that have begun and not ended. Streams do not count: they end when we say so."""

    idle: anyio.Event | None = None
    """Set when the last of them ends, if somebody waits for that."""

    def __mapping__(self) -> dict[str, Handler]:
        generated = super().__mapping__()  # type: ignore[misc]  # of the generated base that follows in the MRO
        return {path: handler._replace(func=self.guarded(handler)) for path, handler in generated.items()}

    def guarded(self, handler: Handler) -> Method:
        async def call(stream: Any) -> None:
            unary = handler.cardinality is Cardinality.UNARY_UNARY
            self.calls += unary
            try:
                await answered(handler.func, stream)
            finally:
                self.calls -= unary
                if self.idle is not None and not self.calls:
                    self.idle.set()

        return call

    async def drained(self) -> None:
        """Waits until no unary call is going on."""
        if self.calls:
            self.idle = anyio.Event()
            await self.idle.wait()

    async def _call_rpc_handler_server_stream(
        self, handler: Callable[[Any], AsyncIterator[Any]], stream: Any, request: Any
    ) -> None:
        """As generated, but the generator is closed with the stream instead of whenever it is collected."""
        async with aclosing(cast(AsyncGenerator[Any, None], handler(request))) as messages:
            async for message in messages:
                await stream.send_message(message)


async def answered(method: Method, stream: Any) -> None:
    """Answers one call, its errors as gRPC statuses."""
    try:
        await method(stream)
    except TopoalignError as error:
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), Status.UNAVAILABLE)
        raise GRPCError(status, clean(f"{error.code}: {error.finding}; {error.remedy}", LONGEST_MESSAGE)) from error
    except AssertionError as error:
        # grpclib and the generated code assert that a request has arrived, and has arrived whole
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended early") from error
    except NotImplementedError as error:
        raise GRPCError(
            Status.UNIMPLEMENTED, "compressed requests are not understood: send them as they are"
        ) from error


async def no_such_method(stream: Any) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, "there is no such method here")


class Methods(dict[str, Handler]):
    """
    The methods of a server by path, and an answer for any other. grpclib's own for these has no content type, which clients
    take for a failure of the transport.
    """

    OTHER = Handler(no_such_method, Cardinality.UNARY_UNARY, Message, Message)

    def get(self, path: str, default: Any = None) -> Handler:
        return super().get(path, self.OTHER)


class Guard(H2Protocol):
    """One connection: looked at before it is served, and while requests arrive."""

    server: "Server"
    silent = 0
    """Looks in a row at which nothing had come since the one before."""
    next_look: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        refusal = self.server.refusal(transport.get_extra_info("socket"))
        if refusal is None:
            self.server.connections.add(self)
            self.next_look = get_running_loop().call_later(PING_SECONDS, self.look)
        else:
            self.processor.close(refusal)

    def look(self) -> None:
        """
        Hangs up on a peer that is silent. One look is no evidence: when this process has been stopped, it may come before
        what arrived meanwhile is read.
        """
        self.silent += 1
        if self.silent == SILENT_LOOKS:
            self.processor.close("silent")
        else:
            self.next_look = get_running_loop().call_later(PING_SECONDS, self.look)

    def data_received(self, data: bytes) -> None:
        self.silent = 0
        try:
            super().data_received(data)
        except Exception as error:  # h2 and grpclib raise many kinds at a peer that speaks something else
            log.warning("connection closed", reason="not gRPC", error=clean(str(error) or type(error).__name__))
            self.processor.close("not gRPC")
            return
        for stream in self.processor.streams.values():
            if stream.data_received > LARGEST_REQUEST and stream.wrapper is not None and not stream.wrapper.cancelled:
                stream.wrapper.cancel(
                    GRPCError(Status.RESOURCE_EXHAUSTED, f"a request has at most {LARGEST_REQUEST} bytes")
                )

    def connection_lost(self, exc: BaseException | None) -> None:
        self.server.connections.discard(self)
        if self.next_look is not None:
            self.next_look.cancel()
        super().connection_lost(cast(Exception | None, exc))


class Server(grpclib.server.Server):
    """Serves one `Servicer` on one unix socket, once."""

    def __init__(self, servicer: Servicer, path: Path, field: str) -> None:
        """`field` names the setting that the path came from, for errors."""
        super().__init__([servicer], codec=QuickCodec(), config=KEEPALIVE)
        self._mapping = Methods(self._mapping)
        events.listen(self, events.RecvMessage, decoded)
        self.servicer = servicer
        self.path = path
        self.field = field
        self.identity: sockets.Identity | None = None
        self.connections: set[Guard] = set()
        self.draining = False
        self.refused: set[str] = set()

    async def listen(self) -> None:
        """Binds and serves. Raises what `sockets.listen` raises."""
        listening = sockets.listen(self.path, self.field)
        self.identity = sockets.identity(self.path)
        await self.start(sock=listening)

    @property
    def in_place(self) -> bool:
        """Whether the socket is still where it was made."""
        return self.identity is not None and sockets.identity(self.path) == self.identity

    async def stop(self, within: float) -> None:
        """Takes no new connections, lets the calls that go on end for `within` seconds, then closes. Not to be cancelled."""
        self.draining = True
        sockets.remove(self.path, self.identity)
        self.identity = None
        with anyio.move_on_after(within, shield=True):
            await self.servicer.drained()
        if self._server is not None:
            self.close()
            for connection in tuple(self.connections):
                connection.processor.close("stopping")
            with anyio.move_on_after(within, shield=True):
                await self.wait_closed()

    def refusal(self, connection: socket.socket) -> str | None:
        """Why a peer is not served, said once in the log per reason. None: it is."""
        if self.draining:
            return "stopping"
        who = sockets.peer(connection)
        if who.uid not in (0, os.geteuid()):
            reason = f"peer runs as uid {who.uid}"
        elif len(self.connections) >= MOST_CONNECTIONS:
            reason = f"more than {MOST_CONNECTIONS} connections"
        else:
            return None
        if reason not in self.refused and len(self.refused) < MOST_CONNECTIONS:
            self.refused.add(reason)
            log.warning("connection refused", reason=reason, pid=who.pid, socket=self.path.name)
        return reason

    def _protocol_factory(self) -> H2Protocol:
        """grpclib offers no other place to look at a connection."""
        plain = super()._protocol_factory()
        guard = Guard(plain.handler, plain.config, plain.h2_config)
        guard.server = self
        return guard
