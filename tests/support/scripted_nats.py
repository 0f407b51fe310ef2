"""A NATS server of a few lines that drops its connections when its script says so, and has all of topoalign's stores."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random

import anyio
from anyio.abc import SocketAttribute, SocketStream

from topoalign.runtime import event_stores

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
