"""What hostile clients of an HTTP server cannot do to the others, over real sockets."""

import asyncio
import gc
import resource
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskStatus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from topoalign.runtime import connections
from topoalign.runtime.connections import MOST_PIPELINED, HttpConnection
from topoalign.runtime.fair_share import Peer
from topoalign.runtime.http_server import listen_on_port, serve_application
from topoalign.runtime.request_turns import (
    LONGEST_SECONDS,
    WORKING,
    RequestTurns,
    TaskTurns,
    outlive_connection,
    take_turn,
)
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

MOST = 8
HONEST, HOSTILE = "127.0.0.1", "127.0.0.2"
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW_HEAD, SLOW_BODY = b"GET / HTTP/1.1\r\nX: ", b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"


class Server:
    """Pages, and what was asked of them."""

    def __init__(self) -> None:
        self.address = (HONEST, 0)
        self.large = self.begun = self.ended = self.open = self.pieces = 0
        self.asked = anyio.Event()
        self.given = anyio.Event()
        self.clock = ManualClock()
        self.slices: list[str] = []
        self.peers: list[Peer] = []
        self.made: list[weakref.ref[HttpConnection]] = []

    async def page(self, request: Request) -> Response:
        working = WORKING.get()
        assert working is not None
        self.peers.append(working.peer)
        return PlainTextResponse("here")

    async def body(self, request: Request) -> Response:
        self.asked.set()
        pieces = [piece async for piece in request.stream() if piece]
        self.pieces += len(pieces)
        return Response(b"".join(pieces) + b" is here")

    async def large_page(self, request: Request) -> Response:
        self.large += 1
        return Response(b"x" * 16_000_000)

    async def later(self, request: Request) -> Response:
        """Ends when `given` is set; `?effect`: also where its connection is lost."""
        if "effect" in request.query_params:
            outlive_connection()
        self.begun += 1
        self.asked.set()
        await self.given.wait()
        await take_turn()
        self.ended += 1
        return PlainTextResponse("late")

    async def work(self, request: Request) -> Response:
        """Works a slice, and `?endless` until `given` is set."""
        name, turns = request.url.query, TaskTurns(self.clock)
        self.slices.append(name)
        while not self.given.is_set():
            self.clock._now += 2 * LONGEST_SECONDS
            await turns.give()
            self.slices.append(name)
            if name != "endless" and self.slices.count(name) == 4:
                self.given.set()
        return PlainTextResponse("here")

    def end_connections(self) -> None:
        for each in self.made:
            if (connection := each()) is not None:
                connection.end()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        paths = {
            "/": self.page,
            "/livez": self.page,
            "/large": self.large_page,
            "/later": self.later,
            "/work": self.work,
        }
        routes = [*(Route(path, page) for path, page in paths.items()), Route("/body", self.body, methods=["POST"])]
        listener = listen_on_port(HONEST, 0)
        self.address = listener.getsockname()

        class Counted(HttpConnection):
            def connection_made(it, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
                super().connection_made(transport)
                self.open += 1
                self.made.append(weakref.ref(it))

            def connection_lost(it, exc: Exception | None) -> None:
                super().connection_lost(exc)
                self.open -= 1

        async def serve(*, task_status: TaskStatus[str]) -> None:
            await serve_application(
                Starlette(routes=routes),
                listener,
                protocol=Counted,
                turns=RequestTurns(self.clock.monotonic),
                idle_seconds=3600,
                task_status=task_status,
            )

        async with anyio.create_task_group() as tasks:
            await tasks.start(serve)
            yield
            tasks.cancel_scope.cancel()

    @contextmanager
    def client(self, source: str, sent: bytes) -> Iterator[socket.socket]:
        """A connection from this address, over which this was sent."""
        with socket.create_connection(self.address, 60, source_address=(source, 0)) as client:
            client.sendall(sent)
            yield client

    async def answer(self, client: socket.socket, sent: bytes = b"") -> bytes:
        """All that comes up to "here", or until the server closes the connection."""

        def read() -> bytes:
            found = bytearray()
            try:
                client.sendall(sent)
                while not found.endswith(b"here") and (got := client.recv(1 << 20)):
                    found += got
            except ConnectionError:
                pass
            return bytes(found)

        return await to_thread.run_sync(read)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(connections, "MOST", MOST)
    return Server()


@pytest.mark.parametrize(
    ("descriptors", "expected"), [(16, 4), (1024, 128), (2048, 256), (1 << 20, 256), (resource.RLIM_INFINITY, 256)]
)
def test_connections_take_an_eighth_of_the_file_descriptors_at_most(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))

    assert expected == connections.most()


@pytest.mark.parametrize("source", [HOSTILE, HONEST])
@pytest.mark.parametrize("sent", [SLOW_HEAD, SLOW_BODY, b"", GET % b"/"], ids=["head", "body", "nothing", "idle"])
async def test_no_number_of_connections_keeps_others_out(server: Server, source: str, sent: bytes) -> None:
    """T05: the new connection was closed as no other was silent; now one of the peer that has most, the latest of them."""
    async with server.run():
        with ExitStack() as opened:
            hostile = []
            for _ in range(3 * MOST):
                hostile.append(opened.enter_context(server.client(source, sent)))
                await all_tasks_blocked()
            answers = []
            for _ in range(MOST):
                with server.client(HONEST, b"") as honest:
                    answers.append(await server.answer(honest, GET % b"/"))

    assert MOST == len([answer for answer in answers if answer.endswith(b"here")])


@pytest.mark.parametrize("sent", [b"", GET % b"/"], ids=["new", "kept"])
async def test_a_connection_that_begins_a_request_stays_before_one_that_waits_on(server: Server, sent: bytes) -> None:
    """The server has waited for its request since then, and for the other peer since it was made or answered."""
    async with server.run():
        with ExitStack() as opened:
            held = []
            for _ in range(MOST):
                held.append(opened.enter_context(server.client(HOSTILE, sent)))
                if sent:
                    await server.answer(held[-1])
                await all_tasks_blocked()
            held[0].sendall(SLOW_HEAD)
            await all_tasks_blocked()
            opened.enter_context(server.client(HOSTILE, b""))
            await all_tasks_blocked()
            closed = [place for place, each in enumerate(held) if is_closed(each)]

    assert [1] == closed


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_a_kept_connection_stays_while_another_peer_has_more(server: Server) -> None:
    async with server.run():
        with ExitStack() as opened:
            honest = [opened.enter_context(server.client(HONEST, GET % b"/")) for _ in range(MOST // 2 - 1)]
            answers = [await server.answer(each) for each in honest]
            for _ in range(3 * MOST):
                opened.enter_context(server.client(HOSTILE, SLOW_BODY))
                await all_tasks_blocked()
            answers += [await server.answer(each, GET % b"/") for each in honest]

    assert MOST - 2 == len([answer for answer in answers if answer.endswith(b"here")])


async def test_answers_that_are_not_read_are_not_made_and_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """T06: one answer for each connection, however many requests were sent; then it is closed, and others are served."""
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.05)
    async with server.run():
        with ExitStack() as opened:
            pipelined = GET % b"/large" * MOST_PIPELINED
            hostile = [opened.enter_context(server.client(HOSTILE, pipelined)) for _ in range(MOST - 1)]
            while server.large < len(hostile):
                await anyio.lowlevel.checkpoint()
            with server.client(HONEST, GET % b"/livez") as honest:
                answer = await server.answer(honest)
            with anyio.fail_after(20):
                while server.open:
                    await all_tasks_blocked()

    assert answer.endswith(b"here")
    assert len(hostile) == server.large


@pytest.mark.parametrize("source", [HOSTILE, HONEST])
async def test_large_requests_keep_no_small_one_waiting(server: Server, source: str) -> None:
    """T07: of another address, or of the same one, a small request has a slice for each of theirs, and /livez at once."""
    async with server.run():
        with ExitStack() as opened:
            hostile = [opened.enter_context(server.client(source, GET % b"/work?endless")) for _ in range(MOST - 2)]
            while server.slices.count("endless") < 10 * len(hostile):
                await anyio.lowlevel.checkpoint()
            with server.client(HONEST, GET % b"/livez") as probe:
                alive = await server.answer(probe)
            with server.client(HONEST, GET % b"/work?small") as honest:
                answer = await server.answer(honest)

    small = [place for place, name in enumerate(server.slices) if name == "small"]
    assert alive.endswith(b"here") and answer.endswith(b"here")
    assert small[3] - small[0] <= 8


async def test_probes_of_an_address_have_a_share_of_their_own(server: Server) -> None:
    """A kubelet's probe does not wait for the other requests that come from its address."""
    async with server.run():
        for path in (b"/", b"/livez"):
            with server.client(HONEST, GET % path) as client:
                await server.answer(client)

    assert [(HONEST,), (HONEST, "probe")] == server.peers


async def test_the_pieces_of_a_slow_body_wake_its_request_once(server: Server) -> None:
    async with server.run():
        with server.client(HONEST, SLOW_BODY) as client:
            for _ in range(7):
                client.sendall(b" ")
                await all_tasks_blocked()
            begun = server.asked.is_set()
            answer = await server.answer(client, b"}")

    assert answer.endswith(b"{       } is here")
    assert (False, 1) == (begun, server.pieces)


async def test_a_request_with_a_slow_body_begins_after_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the limits that the application has for a body hold."""
    monkeypatch.setattr(connections, "PART_SECONDS", 0)
    async with server.run():
        with server.client(HONEST, SLOW_BODY):
            with anyio.fail_after(20):
                await server.asked.wait()

    assert 0 == server.pieces


@pytest.mark.parametrize("sent", [b"", SLOW_HEAD, SLOW_BODY, GET % b"/", GET % b"/later", GET % b"/later" * 3])
async def test_a_closed_connection_is_no_garbage_for_the_collector(server: Server, sent: bytes) -> None:
    """Thousands of them would make collections long, and those in use during a collection would be frozen."""
    gc.disable()
    try:
        async with server.run():
            with server.client(HONEST, sent):
                while not server.made:
                    await anyio.lowlevel.checkpoint()
                await all_tasks_blocked()
                server.end_connections()
                while server.open:
                    await anyio.lowlevel.checkpoint()
            await all_tasks_blocked()
            left = [each for each in server.made if each() is not None]
    finally:
        gc.enable()

    assert [] == left


async def test_more_requests_than_wait_on_a_connection_end_it(server: Server) -> None:
    """T06: a read of 256 KiB has thousands of them, each of which would be kept."""
    async with server.run():
        with server.client(HONEST, GET % b"/later" * 1_000) as client:
            answer = await server.answer(client)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.begun <= 1


async def test_what_nobody_waits_for_ends_but_what_has_effects(server: Server) -> None:
    async with server.run():
        for number, path in enumerate((b"/later", b"/later?effect"), 1):
            with server.client(HONEST, GET % path):
                while server.begun < number:
                    await anyio.lowlevel.checkpoint()
            await all_tasks_blocked()
        server.given.set()
        while not server.ended:
            await anyio.lowlevel.checkpoint()
        await all_tasks_blocked()

    assert (2, 1) == (server.begun, server.ended)


async def test_a_peer_pays_for_the_time_of_its_new_connections(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[Peer] = []
    monkeypatch.setattr(RequestTurns, "charge", lambda self, request, seconds: charged.append(request.peer))
    async with server.run():
        with server.client(HOSTILE, GET % b"/") as client:
            await server.answer(client)

    assert [(HOSTILE,)] == charged
