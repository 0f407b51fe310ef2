"""
Hostile clients of a registry: the arguments KIND COUNT SOURCE PORT; they hold so many connections until they are ended.

Each connection comes from the address SOURCE, and is made again half a second after the registry has closed it.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.tools.bench.filter.scheduler import about

TRICKLE_SECONDS = 0.5
"""Between two bytes of a slow request, and before a closed connection is made again."""
HEAD = (
    b"POST /scheduler/filter HTTP/1.1\r\nHost: registry\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
PIPELINED = 200
CONTAINERS = 100
"""Of a large pod: as many as the registry takes."""
NUMBERS = count()

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send_slow_head(streams: Streams) -> None:
    """Sends the head of a request byte by byte, without end."""
    await trickle(streams, b"POST /scheduler/filter HTTP/1.1\r\nX: ")


async def send_slow_body(streams: Streams) -> None:
    """Sends a whole head, then the body byte by byte."""
    await trickle(streams, HEAD % 1_000_000)


async def trickle(streams: Streams, begin: bytes) -> None:
    """Sends this, then one byte after the other until the connection is closed."""
    reader, writer = streams
    writer.write(begin)
    while not reader.at_eof():
        writer.write(b"x")
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(4096), TRICKLE_SECONDS)


async def leave_answers_unread(streams: Streams) -> None:
    """Asks for the metrics many times in one go, and reads nothing."""
    _, writer = streams
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket's transport
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: registry\r\n\r\n" * PIPELINED)
    while not writer.is_closing():  # a reset shows at the next byte
        await asyncio.sleep(TRICKLE_SECONDS)
        writer.write(b"\r\n")


async def filter_large_pods(streams: Streams) -> None:
    """Filters one large pod after another; no two ask for the same."""
    reader, writer = streams
    while True:
        body = about(large_pod(), [NodeName("node-0")])
        writer.write(HEAD % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))


def large_pod() -> bytes:
    """A pod with `CONTAINERS` containers, each with a GPU, a CPU and an amount of memory that no pod before had."""
    number = next(NUMBERS)
    asked = {"cpu": "1", "memory": f"{1024 + number}Mi", "nvidia.com/gpu": "1"}
    containers = [
        {"name": f"c{place}", "resources": {"limits": asked, "requests": asked}} for place in range(CONTAINERS)
    ]
    metadata = {"name": f"large-{number}", "namespace": "research", "uid": f"large-{number}"}
    return msgspec.json.encode({"metadata": metadata, "spec": {"containers": containers}})


KINDS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    "slow-heads": send_slow_head,
    "slow-bodies": send_slow_body,
    "unread-answers": leave_answers_unread,
    "large-pods": filter_large_pods,
}


async def hold(work: Callable[[Streams], Awaitable[None]], source: str, port: int) -> None:
    """Attacks over one connection, for ever."""
    while True:
        with suppress(OSError, EOFError):
            streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), family=socket.AF_INET)
            try:
                await work(streams)
            finally:
                streams[1].transport.abort()
        await asyncio.sleep(TRICKLE_SECONDS)


async def attack(kind: str, number: int, source: str, port: int) -> None:
    """Holds so many connections; prints a line once all of them are begun."""
    os.nice(19)  # attackers have machines of their own: here they take no time from the registry
    holding = [asyncio.create_task(hold(KINDS[kind], source, port)) for _ in range(number)]
    print("attacking", flush=True)
    await asyncio.gather(*holding)


def main() -> None:
    """Attacks until it is ended."""
    kind, number, source, port = sys.argv[1:]
    asyncio.run(attack(kind, int(number), source, int(port)))
