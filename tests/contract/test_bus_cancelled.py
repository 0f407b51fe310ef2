"""
The client library cancels tasks of its own, and with them what tasks of ours wait for. None of ours ends by that.

asyncio: a task that is cancelled while it waits for a future cancels the future, and so all other tasks that wait for it.
nats-py 2.16.0: `Client.close` cancels the library's reconnection, which waits for the end of the socket, and then waits for
the end of the socket.
"""

import asyncio
import gc
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from random import Random

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from faults_support import THOROUGH

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Endpoint, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus import NatsBus, bus, connect_bus, nats_connection
from topoalign.runtime.nats_bus.nats_connection import NatsConnection, open_connection
from topoalign.runtime.nats_bus.nats_library import CancelledInside, contain_cancellation
from topoalign.runtime.settings import Access
from topoalign.runtime.tasks import StoppedUnasked

INFO = b'INFO {"server_id":"scripted","version":"2.15.1","headers":true,"max_payload":1048576}\r\n'
STALE = b"-ERR 'Stale Connection'\r\n"
"""A server says so before it drops a client; the library then begins to reconnect."""
HEAD = b"NATS/1.0\r\nNats-Stream: %b\r\nNats-Subject: x\r\nNats-Sequence: 7\r\nNats-Time-Stamp: t\r\n\r\n"
ANSWERS = {f"$JS.API.DIRECT.GET.{store.name}": HEAD % store.name.encode() for store in event_stores.STORES}
"""Headers of the message that each read of a store has for its answer."""


class ScriptedNats:
    """Serves each connection for as many commands as `patience` says, and then drops it."""

    def __init__(self, patience: Iterator[int | None], chance: Random | None = None) -> None:
        """`patience` None: that connection is served for as long as it stands."""
        self.url = ""
        self.drops = 0
        self.verbs: deque[str] = deque(maxlen=100)
        """Of the newest commands of all connections."""
        self.patient = anyio.Event()
        """A connection has come that is served for as long as it stands."""
        self.stalls = False
        """The next command is the last that is read: its client hears that it is stale, and its socket stays open."""
        self._patience = patience
        self._chance = chance or Random(0)

    async def serve(self, stream: SocketStream) -> None:
        patience = next(self._patience)
        if patience is None:
            self.patient.set()
        async with stream:
            try:
                await self.answer(stream, patience)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            self.drops += 1
            await self.drop(stream)

    async def answer(self, stream: SocketStream, patience: int | None) -> None:
        """Returns when the connection is to be dropped."""
        if patience == 0:
            return
        await stream.send(INFO)
        inboxes: list[tuple[str, str]] = []
        done = 0
        async for verb, arguments in self.commands(stream):
            done += 1
            self.verbs.append(verb)
            if self.stalls or done == patience:
                return
            if verb == "PING":
                await stream.send(b"PONG\r\n")
            elif verb == "SUB":
                inboxes.append((arguments[0].removesuffix("*"), arguments[-1]))
            elif verb in ("PUB", "HPUB") and arguments[0] in ANSWERS:
                reply = arguments[1]
                head = ANSWERS[arguments[0]]
                sid = next(sid for prefix, sid in inboxes if reply.startswith(prefix))
                await stream.send(f"HMSG {reply} {sid} {len(head)} {len(head)}\r\n".encode() + head + b"\r\n")

    async def commands(self, stream: SocketStream) -> AsyncIterator[tuple[str, list[str]]]:
        data = b""
        while True:
            while b"\r\n" not in data:
                data += await stream.receive()
            line, _, data = data.partition(b"\r\n")
            verb, *arguments = line.decode().split()
            if verb in ("PUB", "HPUB"):
                size = int(arguments[-1]) + 2
                while len(data) < size:
                    data += await stream.receive()
                data = data[size:]
            yield verb, arguments

    async def drop(self, stream: SocketStream) -> None:
        """In one of the ways in which connections end."""
        if self.stalls:
            self.stalls = False
            await stream.send(STALE)
            await anyio.sleep_forever()
        match self._chance.randrange(4):
            case 0:
                await stream.send_eof()
            case 1:
                await anyio.aclose_forcefully(stream)
            case 2:
                await stream.send(STALE)
            case _:
                await stream.send(STALE)
                await anyio.aclose_forcefully(stream)


@asynccontextmanager
async def listening(server: ScriptedNats) -> AsyncIterator[ScriptedNats]:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        server.url = f"nats://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        yield server
        tasks.cancel_scope.cancel()


pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900 if THOROUGH else 300)]

KILLS = 2_000 if THOROUGH else 60
UNREAD = b"PING\r\n" + b"x" * 20_000_000
"""More than the buffers of a socket hold: as long as the server does not read it, the socket does not close."""


async def reconnecting(opened: NatsConnection, server: ScriptedNats) -> None:
    """Until the library has begun to reconnect, and waits for a socket that does not close."""
    server.stalls = True
    transport = opened.client._transport
    assert transport is not None
    transport.write(UNREAD)
    while not opened.transport_closed:
        await anyio.lowlevel.checkpoint()


async def test_what_was_sent_has_reached_the_server_when_a_connection_is_closed() -> None:
    """The server is asked for a sign of life behind it, and only then is the socket closed."""
    async with listening(ScriptedNats(repeat(None))) as scripted:
        opened = await open_connection([scripted.url], "test", Access())
        await opened.send("test.x", b"x")
        await opened.close()

    assert ["PUB", "PING"] == list(scripted.verbs)[-2:]


async def test_closing_while_the_library_reconnects_does_not_end_who_closes() -> None:
    async with listening(ScriptedNats(repeat(None))) as server:
        opened = await open_connection([server.url], "test", Access())
        await reconnecting(opened, server)
        told = opened.lost.is_set()
        await opened.close()

    assert not told, "the library tells of a loss only once the socket is closed"
    assert opened.client.is_closed


async def test_a_bus_whose_poll_finds_the_library_reconnecting_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's end with exit code 0, forced: the connection was closed in this moment, and nothing was said."""
    monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.05)
    monkeypatch.setattr(bus, "FIRST_PAUSE", 0.0)
    async with listening(ScriptedNats(repeat(None))) as server, connect_bus(server.url) as connected:
        first = connected.live()
        await reconnecting(first, server)
        await first.lost.wait()
        while connected._connection in (None, first):
            await anyio.lowlevel.checkpoint()

        assert connected.connected


async def refuse() -> None:
    """As the library does it: what is waited for is cancelled, and not the task that waits."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def test_each_call_that_waits_for_the_library_bears_a_cancellation_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening(ScriptedNats(repeat(None))) as server:
        opened = await open_connection([server.url], "test", Access())
        client = opened.client
        calls: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("publish", lambda: opened.api("$JS.API.STREAM.INFO.X", b"")),
            ("publish", lambda: opened.send("x", b"", "y")),
            ("subscribe", lambda: opened.subscribe("x")),
        ]
        for name, call in calls:
            monkeypatch.setattr(client, name, lambda *args, **kwargs: refuse())
            with pytest.raises(BusUnavailable, match="cancelled the operation"):
                await call()
        monkeypatch.setattr(client, "flush", lambda *args: refuse())
        await opened.close()
        fresh = NatsConnection("x", "_INBOX_x")
        monkeypatch.setattr(fresh.client, "connect", lambda *args, **kwargs: refuse())
        with pytest.raises(BusUnavailable, match="cancelled the operation"):
            await fresh.open("nats://127.0.0.1:9", "x", {}, None)


async def test_a_cancellation_that_is_meant_for_the_task_passes() -> None:
    """By a cancel scope, by `Task.cancel`, and by either at the same moment as one inside."""
    loop = asyncio.get_running_loop()
    passed = 0

    async def wait(future: "asyncio.Future[None]") -> None:
        nonlocal passed
        try:
            with contain_cancellation():
                await future
        except asyncio.CancelledError:
            passed += 1
            raise

    for inside_too in (False, True):
        with anyio.CancelScope() as scope:
            future = loop.create_future()
            loop.call_soon(scope.cancel)
            await wait(future)
        assert scope.cancelled_caught

        future = loop.create_future()
        task = asyncio.create_task(wait(future))
        await asyncio.sleep(0)  # one turn of the loop, so that the task waits; no time passes
        if inside_too:
            future.cancel()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert 4 == passed

    with anyio.CancelScope() as scope, pytest.raises(CancelledInside), contain_cancellation():
        await refuse()
    assert not scope.cancelled_caught


async def test_an_inner_cancellation_is_told_from_an_earlier_outer_one() -> None:
    """As in a `finally`: the task is being cancelled, and a shielded scope closes the connection."""
    closed = False
    with anyio.CancelScope() as scope:
        try:
            scope.cancel()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True), pytest.raises(CancelledInside), contain_cancellation():
                await refuse()
            closed = True

    assert closed
    assert scope.cancelled_caught


async def test_a_bus_whose_own_task_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a cancellation get through all the same, it is an error and not the end of the block."""
    monkeypatch.setattr(NatsConnection, "until_lost", lambda self: refuse())
    async with listening(ScriptedNats(repeat(None))) as server:
        with pytest.raises(StoppedUnasked, match="the connection to NATS stopped although nothing asked it to"):
            async with connect_bus(server.url):
                await anyio.sleep_forever()


async def test_a_bus_survives_connections_that_are_dropped_at_random_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During the handshake, the checks and afterwards; each way a connection ends, with what polls and asks beside it."""
    monkeypatch.setattr(bus, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(bus, "LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.002)
    monkeypatch.setattr(nats_connection, "PINGS_MISSED", 1_000)  # the server drops connections, not a busy machine
    chance = Random(1)
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    before, files = len(asyncio.all_tasks()), open_files()
    server = ScriptedNats(chain((chance.randrange(24) for _ in range(KILLS)), repeat(None)), chance)
    async with (
        listening(server),
        connect_bus(server.url, wait=None) as connected,
        connected.serve("topoalign-test", [Endpoint(name="x", subject="test.x", answer=answer)]),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(asking, connected)
        await server.patient.wait()
        monkeypatch.setattr(nats_connection, "PING_SECONDS", 1)
        await connected.up()
        tasks.cancel_scope.cancel()
    while len(asyncio.all_tasks()) > before or open_files() > files:  # the library's last tasks end by themselves
        await anyio.lowlevel.checkpoint()
    gc.collect()  # asyncio tells of a task that is forgotten before it has ended

    assert KILLS == server.drops
    assert [] == complaints


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def answer(body: bytes) -> bytes:
    return body


async def asking(connected: NatsBus) -> None:
    while True:
        with suppress(BusUnavailable):
            await connected.last_position(Stream.ALLOCATIONS)
        await anyio.lowlevel.checkpoint()
