"""Publishes on NATS what no client library would: any bytes as subject, headers and body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketStream


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
