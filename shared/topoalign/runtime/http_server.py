"""
Runs an HTTP server as a task: it listens before it reports its start, and it shuts down gracefully.

It is uvicorn on a given socket. The runner handles signals. The server serves any application: the pages of a process
(`health_pages`), or the registry's scheduler extender.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.applications import Starlette

from topoalign.core.model.errors import Unavailable, clean
from topoalign.runtime.connections import Handshake, HttpConnection
from topoalign.runtime.fair_share import OpenConnections
from topoalign.runtime.request_turns import RequestTurns

log = logging.getLogger("uvicorn.error")

GRACE_SECONDS = 2
"""How long open requests and event streams can continue after the server begins to stop."""
LOOK_SECONDS = 0.005
"""Seconds between two checks whether all connections are closed. Most are closed at the first check."""
CLOSE = (b"connection", b"close")
IDLE_SECONDS = 5
"""Default of the time after which an idle connection is closed."""
ACCEPTED_AT_ONCE = 4
"""Connections accepted per iteration of the event loop: a millisecond of work, and safe if descriptors are scarce."""
BACKLOG = 1024
"""Connections that can wait to be accepted. If more connections wait, the next client retries only after a second."""
UNREAD_BYTES = 128 * 1024
"""Bytes of a response that the system buffers for a peer that does not read it. The system's default is megabytes."""


class AddressInUse(Unavailable):
    """
    Raised when the HTTP address cannot be listened on.

    Remedy: Choose another port, or stop the process that listens there.
    """


class HttpServer(uvicorn.Server):
    """
    uvicorn as a task: the runner handles signals, and the server reports its start.

    After `stop`, it ends when all responses are sent. uvicorn's own server polls ten times a second.
    """

    def __init__(self, config: uvicorn.Config, url: str, task_status: TaskStatus[str]) -> None:
        super().__init__(config)
        self.server_state.connections = OpenConnections()  # type: ignore[assignment]  # uvicorn uses only these methods
        self._url = url
        self._task_status = task_status
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stops the server after its open responses are sent."""
        self.should_exit = True
        self._stopping.set()

    async def close_connections_after(self, draining: anyio.Event) -> None:
        """After this event, every response closes its connection, so that clients connect to another replica."""
        await draining.wait()
        self.config.encoded_headers.append(CLOSE)  # uvicorn rebuilds the default headers from it each second
        self.server_state.default_headers.append(CLOSE)  # also for requests in progress

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the runner."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then reports the URL to the task group."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio uses one number for the backlog and for accepting at once
        self._task_status.started(self._url)

    async def main_loop(self) -> None:
        """Runs until `stop`. Updates the date in the headers of responses each second."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_date)
            await self._stopping.wait()
            tasks.cancel_scope.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and ends when all open requests are answered, or after GRACE_SECONDS."""
        for server in self.servers:
            server.close()
        open_now = self.server_state.connections
        answers = self.server_state.tasks
        for connection in list(open_now):
            connection.shutdown()
        with anyio.move_on_after(GRACE_SECONDS) as grace:
            while answers:
                await asyncio.wait(answers)
            while open_now:  # noqa: ASYNC110  # no event reports that the last one is closed
                await asyncio.sleep(LOOK_SECONDS)
        if grace.cancelled_caught:
            log.warning(
                "%s answers took more than %s s after the end was due, and are cut off", len(answers), GRACE_SECONDS
            )
            for connection in list(open_now):
                connection.transport.abort()
            await asyncio.sleep(0)  # uvicorn then notices the lost connections and reports no missing response
            for answer in answers:
                answer.cancel()

    async def _keep_date(self) -> None:
        while True:
            await self.on_tick(0)
            await asyncio.sleep(1)


async def serve_application(
    application: Starlette,
    listener: socket.socket,
    *,
    protocol: type[HttpConnection] = HttpConnection,
    turns: RequestTurns | None = None,
    idle_seconds: int = IDLE_SECONDS,
    tls: ssl.SSLContext | None = None,
    draining: anyio.Event | None = None,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """
    Serves on this socket until cancelled, then closes it. Reports its start, with its URL, when it accepts connections.
    After `draining`, it still accepts connections, but closes each one after its response. `turns`: shared by all
    servers of the process; None: this is the only server.
    """
    own = turns or RequestTurns()

    def connection(**of_uvicorn: Any) -> asyncio.Protocol:
        accepted = protocol(turns=own, **of_uvicorn)
        return accepted if tls is None else Handshake(accepted, tls, own)

    config = uvicorn.Config(
        application,
        http=connection,  # type: ignore[arg-type]  # uvicorn calls it
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=idle_seconds,
    )
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    server = HttpServer(config, f"{'http' if tls is None else 'https'}://{host}:{port}", task_status)
    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exit_when_cancelled, server)
            if draining is not None:
                tasks.start_soon(server.close_connections_after, draining)
            with anyio.CancelScope(shield=True):
                await server.serve([listener])
            tasks.cancel_scope.cancel()


async def exit_when_cancelled(server: HttpServer) -> None:
    """Stops uvicorn when this task is cancelled: uvicorn shuts down gracefully after `stop`, not if cancelled."""
    try:
        await anyio.sleep_forever()
    finally:
        server.stop()


def listen_on_port(host: str, port: int, settings: str = "TOPOALIGN_HTTP") -> socket.socket:
    """A listening TCP socket; port 0: any free port. `settings`: prefix of its settings. Raises AddressInUse."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dual = family is socket.AF_INET6  # `::` means all addresses, including IPv4
        listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise AddressInUse(
            f"cannot listen on {clean(host)} port {port}: {clean(str(getattr(error, 'strerror', None) or error))}",
            f"set {settings}_HOST and {settings}_PORT to an address that is free (port 0: any)",
        ) from error
    # Each connection inherits TCP_NODELAY. asyncio sets it only on sockets with an explicit protocol, and
    # these have none. Without it, the second part of a response would wait 40 ms for the acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
    return listener
