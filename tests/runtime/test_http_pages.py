"""The HTTP pages of a process, as its sockets and its clients see them."""

import logging
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketStream, TaskStatus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from topoalign.runtime import http_server
from topoalign.runtime.http_server import listen_on_port, serve_application


class Pages:
    """A page at once, and one that is answered when `given` is set. `serving` is cancelled to end their server."""

    def __init__(self) -> None:
        self.asked, self.given, self.serving = anyio.Event(), anyio.Event(), anyio.CancelScope()
        self.draining = anyio.Event()
        self.ended = False

    async def at_once(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("here")

    async def later(self, request: Request) -> PlainTextResponse:
        self.asked.set()
        await self.given.wait()
        return PlainTextResponse("late")

    @asynccontextmanager
    async def connection(self, path: str) -> AsyncIterator[SocketStream]:
        """A connection over which this path is asked; after it the server has ended."""
        listener = listen_on_port("127.0.0.1", 0)
        self.address = listener.getsockname()
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._serve, listener)
            async with await anyio.connect_tcp(*self.address) as connection:
                await connection.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                yield connection

    async def _serve(self, listener: socket.socket, *, task_status: TaskStatus[str]) -> None:
        application = Starlette(routes=[Route("/", self.at_once), Route("/later", self.later)])
        with self.serving:
            await serve_application(
                application, listener, idle_seconds=3600, draining=self.draining, task_status=task_status
            )
        self.ended = True


def test_an_answer_in_parts_does_not_wait_for_acknowledgements() -> None:
    """Each accepted connection sends at once (TCP_NODELAY)."""
    with listen_on_port("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.anyio
async def test_an_answer_has_a_date_and_its_connection_keeps_no_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "GRACE_SECONDS", math.inf)
    pages = Pages()
    async with pages.connection("/") as connection:
        answer = await connection.receive()
        pages.serving.cancel()
        rest = [more async for more in connection]

    assert b"200 OK" in answer and b"\r\ndate: " in answer
    assert [] == [more for more in rest if b"HTTP" in more]


@pytest.mark.anyio
async def test_what_is_asked_when_the_server_is_to_end_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "GRACE_SECONDS", math.inf)
    pages = Pages()
    async with pages.connection("/later") as connection:
        await pages.asked.wait()
        pages.serving.cancel()
        await anyio.wait_all_tasks_blocked()
        ended = pages.ended
        pages.given.set()
        answer = b"".join([part async for part in connection])

    assert not ended
    assert b"200 OK" in answer and answer.endswith(b"late")


@pytest.mark.anyio
async def test_an_answer_that_does_not_come_ends_with_the_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="uvicorn.error")
    monkeypatch.setattr(http_server, "GRACE_SECONDS", 0)
    pages = Pages()
    async with pages.connection("/later") as connection:
        await pages.asked.wait()
        pages.serving.cancel()
        answer = b"".join([part async for part in connection])

    assert b"late" not in answer
    assert "1 answers took more than 0 s after the end was due, and are cut off" in caplog.text
    assert "Exception" not in caplog.text


@pytest.mark.anyio
async def test_a_server_that_drains_closes_each_connection_after_its_answer() -> None:
    """S09: also one of which the call had begun; new connections are accepted until the server ends."""
    pages = Pages()
    async with pages.connection("/later") as connection:
        await pages.asked.wait()
        pages.draining.set()
        await anyio.wait_all_tasks_blocked()
        pages.given.set()
        begun = b"".join([part async for part in connection])
        async with await anyio.connect_tcp(*pages.address) as another:
            await another.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            new = b"".join([part async for part in another])
        pages.serving.cancel()

    for answer, body in ((begun, b"late"), (new, b"here")):
        assert b"200 OK" in answer and answer.endswith(body)
        assert b"\r\nconnection: close\r\n" in answer
