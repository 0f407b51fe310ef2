"""
An HTTP server as one task among others: it listens before it reports that it has started, and ends in order.

It is uvicorn with a socket of ours, and leaves signals to the runner. What it serves is given: the pages of a process
(`health`), the scheduler's protocol of the registry.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.applications import Starlette

from topoalign.core.model.errors import Unavailable, clean
from topoalign.runtime.connections import Connection, backlog

GRACE_SECONDS = 2
"""How long open requests and event streams may go on once the process stops."""
IDLE_SECONDS = 5
"""After how long a connection without requests is closed, where nothing else is said."""


class AddressInUse(Unavailable):
    """The HTTP address cannot be listened on."""

    code = "AddressInUse"


class Server(uvicorn.Server):
    """uvicorn as one task among others: signals are the runner's, and starting is told."""

    def __init__(self, config: uvicorn.Config, url: str, task_status: TaskStatus[str]) -> None:
        super().__init__(config)
        self._url, self._task_status = url, task_status

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the runner."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report the URL to the task group."""
        await super().startup(sockets)
        self._task_status.started(self._url)


async def serve_application(
    application: Starlette,
    listener: socket.socket,
    *,
    protocol: type[asyncio.Protocol] = Connection,
    idle_seconds: int = IDLE_SECONDS,
    tls: ssl.SSLContext | None = None,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serves on this socket until cancelled, and closes it; has started, with its URL, once it accepts connections."""
    config = uvicorn.Config(
        application,
        http=protocol,
        ws="none",
        backlog=backlog(),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=idle_seconds,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    server = Server(config, f"{'http' if tls is None else 'https'}://{host}:{port}", task_status)
    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exit_when_cancelled, server)
            with anyio.CancelScope(shield=True):
                await server.serve([listener])
            tasks.cancel_scope.cancel()


async def exit_when_cancelled(server: Server) -> None:
    """uvicorn ends in order when told to, and in disorder when cancelled: so it is told."""
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


def listen(host: str, port: int, settings: str = "TOPOALIGN_HTTP") -> socket.socket:
    """
    A listening TCP socket; port 0 picks a free one. `settings`: how the names of the settings of host and port begin.

    Raises AddressInUse if the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dual = family is socket.AF_INET6  # `::` is every address, those of IPv4 too
        listener = socket.create_server(address, family=family, backlog=backlog(), dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise AddressInUse(
            f"cannot listen on {clean(host)} port {port}: {clean(str(getattr(error, 'strerror', None) or error))}",
            f"set {settings}_HOST and {settings}_PORT to an address that is free (port 0: any)",
        ) from error
    # Each connection inherits it. asyncio sets it only where the socket names its protocol, which these do not, and the
    # second part of an answer would wait 40 ms for the acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
