"""
TLS handshakes of an HTTP server: each has a place and a turn, as connections and requests have (`connections`).

asyncio alone shows a connection to the server after its handshake, for which a client may take a minute: connections
without a handshake would count for nothing, and take all file descriptors of the process.
"""

import asyncio
import ssl
from contextlib import suppress

from topoalign.runtime.connections import FairConnection, make_room, peer_of
from topoalign.runtime.request_turns import RequestTurns, Working

HANDSHAKE_SECONDS = 0.002
"""What the keys of a handshake cost. It is charged at once, as the work is done when parts of the handshake come."""


class Handshake(asyncio.Protocol):
    """A connection up to the end of its handshake, after which it is that of `http`."""

    transport: asyncio.Transport
    within = 4.0
    """Seconds that it may take, as the head of a request."""

    def __init__(self, http: FairConnection, tls: ssl.SSLContext, turns: RequestTurns) -> None:
        self._http = http
        self._tls = tls
        self._turns = turns
        self._connections = http.connections
        self._early: list[bytes] = []
        """What has come of the first request together with the end of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a place, and waits for its turn."""
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
        """Gives the place back."""
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
        """The server ends."""
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
