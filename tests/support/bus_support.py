"""Messages for tests of the bus, and a nats-server that can be killed."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketStream

from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Message, Received, Stream
from topoalign.runtime import nats_server
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import apply_stores


class RawNats:
    """Speaks the protocol of NATS itself over one connection."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    async def publish(self, subject: str, body: bytes, headers: bytes = b"") -> None:
        """`headers` are lines as they go over the wire, without the line ends of the last."""
        head = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
        sizes = f"HPUB {subject} {len(head)} {len(head) + len(body)}\r\n".encode()
        await self._stream.send(sizes + head + body + b"\r\n")

    async def done(self) -> None:
        """Until the server has taken in everything. Raises RuntimeError if it complained."""
        await self._stream.send(b"PING\r\n")
        answer = b""
        while b"PONG" not in answer:
            answer += await self._stream.receive()
        if b"-ERR" in answer:
            raise RuntimeError(answer)


@asynccontextmanager
async def raw_nats(port: int) -> AsyncIterator[RawNats]:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b'CONNECT {"headers":true,"verbose":false}\r\n')
        yield RawNats(stream)


T = TypeVar("T")
GRANTED = "topoalign.v1.allocation.node-1.granted"


def said(number: int, subject: str = GRANTED) -> Message:
    return Message(subject=subject, headers={"Nats-Msg-Id": f"test.{number}"}, body=b'{"n":%d}' % number)


def granted(node: str, number: int) -> Message:
    return said(number, f"{wire.PREFIX}.allocation.{wire.encode_node_token(NodeName(node))}.granted")


class FailingBus(MemoryBus):
    """A bus that refuses what is published, cannot be reached, is slow, or has lost what it had."""

    refusal: Unavailable | None = None
    away = False
    emptied = False
    tries = 0
    """How often something was published, or was to be."""

    def __init__(self) -> None:
        super().__init__()
        self.open = anyio.Event()
        self.open.set()

    @property
    def connected(self) -> bool:
        return not self.away

    def _reach(self) -> None:
        if self.away:
            raise BusUnavailable("away")

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        self.tries += 1
        await self.open.wait()
        self._reach()
        if self.refusal is not None:
            raise self.refusal
        return await super().publish(message, expected_last)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        self._reach()
        return 0 if self.emptied else await super().last_position(stream, subject)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        self._reach()
        return await super().ask(subject, body, within)


async def receive(messages: AsyncIterator[T], count: int) -> list[T]:
    return [await anext(messages) for _ in range(count)]


def bodies(received: list[Received]) -> list[bytes]:
    return [one.message.body for one in received]


async def stored(bus: Bus, message: Message) -> int:
    """Publishes as an outbox does: again, under the same id, until it is confirmed."""
    while True:
        try:
            return await bus.publish(message)
        except BusUnavailable:
            await anyio.lowlevel.checkpoint()


async def disconnected(bus: Bus) -> None:
    while bus.connected:  # the port has no event for it
        await anyio.lowlevel.checkpoint()


async def stopped(pid: int) -> None:
    """Waits until a process that was sent SIGSTOP stands still."""
    while not stands_still(pid):
        await anyio.lowlevel.checkpoint()


def stands_still(pid: int) -> bool:
    """Whether all its threads do; those that strace follows, too."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] in "Tt" for thread in threads)


class KillableServer:
    """A nats-server on one port and one directory for all its lives."""

    def __init__(self, store: Path, more: str = "", whole: str | None = None) -> None:
        self.store = store
        self.more = more
        self.whole = whole
        self.port: int | None = None
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        settings = self.whole or nats_server.server_configuration(self.store, self.port) + self.more
        self.process = nats_server.start_server(self.store, settings)
        self.url = await nats_server.url_of(self.process, self.store)
        self.port = urlsplit(self.url).port
        return self.url

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def killable(
    store: Path, more: str = "", whole: str | None = None, *, administrator: str | None = ""
) -> AsyncIterator[KillableServer]:
    """
    `more` settings beside the usual ones, or the `whole` of them. With all stores, which the `administrator`
    (`user:password`) creates; None: without stores.
    """
    server = KillableServer(store, more, whole)
    await server.start()
    try:
        if administrator is not None:
            await apply_stores(as_user(server.url, administrator))
        yield server
    finally:
        server.kill()


def as_user(url: str, credentials: str) -> str:
    """The URL with `user:password` in it."""
    return url.replace("nats://", f"nats://{credentials}@") if credentials else url
