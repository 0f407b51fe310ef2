"""
Adapts the NATS client library, and contains its cancellations (nats-py 2.16.0).

The library cancels its own tasks. If such a task waits for the same future as a task of ours, as both wait
for the end of the socket in `Client.close`, asyncio cancels the future, and our task ends with a CancelledError that
nobody requested. A task group takes such an error for its own cancellation: the block ends, and no error is raised.
`contain_cancellation` turns it into an error of the library.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import cast

import nats.errors
from nats.aio import transport
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus.delivered import Delivered

PARKED = 3600.0
CLOCK = SystemClock()


class CancelledInside(nats.errors.Error):
    """Raised if the library cancelled the call that we waited for. Its outcome is unknown."""

    def __str__(self) -> str:
        return "nats: the client library cancelled the operation"


@contextmanager
def contain_cancellation() -> Iterator[None]:
    """
    Must enclose each call that waits for the library. Raises CancelledInside if the library has cancelled the call. A
    requested cancellation of this task is passed on; asyncio counts these (`Task.cancelling`).
    """
    task = asyncio.current_task()
    assert task is not None, "the library is only called from tasks"
    asked = task.cancelling()
    try:
        yield
    except asyncio.CancelledError as error:
        if task.cancelling() > asked:
            raise
        raise CancelledInside from error


class TolerantClient(Client):
    """
    The library's client, which also accepts subjects that are not UTF-8. Otherwise such a subject would end the
    library's read loop, again on every new connection. The invalid bytes are replaced, and the receiver puts the
    message on the dead-letter stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Callable[[Delivered], None]] = {}

    def deliver(self, subscription: Subscription, take: Callable[[Delivered], None]) -> None:
        """Calls `take` with each message of the subscription when it arrives, without a queue, until it ends."""
        self._takers[subscription._id] = take

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._takers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self._takers.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            take(Delivered(subject, data, headers or b""))

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        whole = subject.decode(errors="replace").encode()
        return cast(Msg, super()._build_message(sid, whole, reply, data, headers))


def parked(servers: list[Server], info: dict[str, object]) -> tuple[None, float]:
    """Prevents the library from reconnecting. Instead, the bus closes this connection and opens a new one."""
    return None, PARKED


def abandon(client: Client) -> None:
    """Ends what remains after a failed `Client.close`: its tasks, and the socket of a failed TLS handshake."""
    own = [client._reading_task, client._ping_interval_task, client._flusher_task, client._reconnection_task]
    for task in [*own, *(subscription._wait_for_msgs_task for subscription in client._subs.values())]:
        if task is not None:
            task.cancel()
    client._subs.clear()
    socket = socket_of(client)
    if socket is not None:
        socket.abort()


def socket_of(client: Client) -> asyncio.WriteTransport | None:
    """The socket of a plain or TLS connection; None for another one. The library has no public attribute for it."""
    used = client._transport
    writer = used._bare_io_writer if isinstance(used, transport.TcpTransport) else None
    return writer.transport if writer is not None else None


def load_websockets() -> None:
    """Gives the library its modules for `ws://` and `wss://`, if installed (the package hides them at import)."""
    with suppress(ModuleNotFoundError):
        for name in ("aiohttp", "multidict"):
            vars(transport)[name] = import_module(name)
