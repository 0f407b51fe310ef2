"""
Floods on the kubelet's socket: what they hold and what they make us do is bounded, and the kubelet's own calls go on.

Work and bytes are counted; nothing looks at the time.
"""

import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing

import anyio
import pytest
import structlog
from betterproto2 import Message
from device_allocations_support import MemoryAllocator
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hpack import Encoder
from kubelet_support import frame, node, serving, short_directory, two_nodes

from topoalign.allocator.device_plugin.plugin_server import MOST_OTHERS, DevicePlugin
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.kubelet.grpc import arriving, grpc_connection, transport, unix_sockets
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import LOOKS, SMALL_REQUEST
from topoalign.kubelet.grpc.decoding import Decoding, field
from topoalign.kubelet.grpc.grpc_connection import (
    CONTROLS_PER_RESET,
    END_HEADERS,
    END_STREAM,
    MOST_CALLS,
    MOST_CONTROLS,
    PREFACE,
    TABLE_BYTES,
    FrameType,
)
from topoalign.kubelet.grpc.transport import MOST_CONNECTIONS, Complaints, GrpcServer, Load
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, FrameType.SETTINGS, 0, 0, 0, 0, 0))
EMPTY = struct.pack(">?I", False, 0)
GPU_0 = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["GPU-0"])])
assert len(HELLO) == PREFACE + 9


def call(method: str, stream: int, body: bytes | None = None) -> bytes:
    """A call that begins; whole, if it has a body."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/v1beta1.DevicePlugin/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    begins = frame(FrameType.HEADERS, Encoder().encode(headers.items()), END_HEADERS, stream)
    return begins if body is None else begins + frame(FrameType.DATA, body, END_STREAM, stream)


@asynccontextmanager
async def kubelet_of(server: GrpcServer) -> AsyncIterator[v1beta1.DevicePluginStub]:
    """A client that listens, as the kubelet does, and whose stream is still there in the end."""
    with closing(Channel(path=str(server.path))) as channel:
        stub = v1beta1.DevicePluginStub(channel)
        stream = stub.list_and_watch(v1beta1.Empty())
        await anext(stream)
        watch = server.servicer.watch  # type: ignore[attr-defined]  # of the servicer that this server has
        yield stub

        assert watch.open
        assert watch is server.servicer.watch  # type: ignore[attr-defined]  # of the servicer that this server has


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not true():
            await anyio.lowlevel.checkpoint()


def connected(server: GrpcServer, held: ExitStack) -> socket.socket:
    one = held.enter_context(socket.socket(socket.AF_UNIX))
    one.setblocking(False)
    one.connect(str(server.path))
    return one


async def sent(one: socket.socket, data: bytes) -> bool:
    """Sends all of it, and reads what comes; False if the peer has hung up."""
    at = 0
    while at < len(data):
        try:
            at += one.send(data[at:])
        except BlockingIOError:
            await anyio.lowlevel.checkpoint()
        except OSError:
            return False
        try:
            while one.recv(2**16):
                pass
        except BlockingIOError:
            continue
        except OSError:
            return False
        return False
    return True


async def test_unfinished_requests_stay_within_their_bound_oldest_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Unfinished requests hold no more than their bound, and the oldest are dropped first. Thirty connections have thirty
    calls each, of which 16 KiB have come and the rest never does.
    """
    monkeypatch.setattr(arriving, "MOST_BYTES", 2**20)
    part = struct.pack(">?I", False, 10**6) + bytes(16_000)
    async with serving() as server, kubelet_of(server) as kubelet:
        with ExitStack() as held:
            most = 0
            for one in [connected(server, held) for _ in range(MOST_CONNECTIONS - 2)]:
                calls = (
                    call("Allocate", 2 * n + 1) + frame(FrameType.DATA, part, 0, 2 * n + 1)
                    for n in range(MOST_CALLS - 2)
                )
                assert await sent(one, HELLO + b"".join(calls))
                most = max(most, server.arriving.size)
            assert 1 == len((await kubelet.allocate(GPU_0)).container_responses)
            assert 2**19 <= most <= 2**20 + 2**15
        await until(lambda: len(server.connections) == 1)
        await until(lambda: server.arriving.size == 0)


async def test_the_bound_holds_for_all_sockets_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MOST_BYTES", 2**18)
    part = struct.pack(">?I", False, 10**6) + bytes(16_000)
    load = Load()
    async with serving(load=load) as first, serving(load=load) as second:
        with ExitStack() as held:
            for server in (first, second):
                one = connected(server, held)
                for n in range(20):
                    assert await sent(one, (HELLO if n == 0 else b"") + call("Allocate", 2 * n + 1))
                    assert await sent(one, frame(FrameType.DATA, part, 0, 2 * n + 1))
            await until(lambda: load.arriving.size > 2**17)

            assert load.arriving.size <= 2**18 + 2**15


async def test_a_request_that_does_not_end_is_ended_at_the_third_look() -> None:
    async with serving() as server:
        with ExitStack() as held:
            one = connected(server, held)
            await sent(one, HELLO + call("Allocate", 1) + frame(FrameType.DATA, struct.pack(">?I", False, 100), 0, 1))
            await until(lambda: len(server.arriving) == 1)
            (guard,) = server.connections
            for _ in range(LOOKS):
                guard.look()
                guard.silent = 0
            await all_tasks_blocked()
            before = len(server.arriving)
            guard.look()
            await until(lambda: not guard.processor.streams)

            assert (1, 0) == (before, len(server.arriving))


async def test_a_request_without_fields_may_have_a_kilobyte_also_in_small_frames() -> None:
    async with serving() as server, kubelet_of(server):
        with ExitStack() as held:
            one = connected(server, held)
            prefix = struct.pack(">?I", False, 10**6)
            await sent(one, HELLO + call("GetDevicePluginOptions", 1) + frame(FrameType.DATA, prefix, 0, 1))
            await until(lambda: len(server.arriving) == 2)
            for _ in range(2 * SMALL_REQUEST):
                await sent(one, frame(FrameType.DATA, b"x", 0, 1))
                if len(server.arriving) < 2:
                    break
            await until(lambda: len(server.arriving) == 1)


async def test_large_requests_of_names_that_are_none_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of half a megabyte: 250,000 empty ids each."""
    decoded: list[int] = []
    step = Decoding.step

    def counting(self: Decoding) -> Message | None:
        message = step(self)
        decoded.append(1)
        return message

    monkeypatch.setattr(Decoding, "step", counting)
    body = field(1, b"\n\0" * 250_000)
    empties = v1beta1.AllocateRequest()
    monkeypatch.setattr(v1beta1.AllocateRequest, "SerializeToString", lambda self: body)
    statuses: list[Status] = []

    async def flood(server: GrpcServer) -> None:
        with closing(Channel(path=str(server.path))) as channel, pytest.raises(GRPCError) as refused:
            await v1beta1.DevicePluginStub(channel).allocate(empties)
        statuses.append(refused.value.status)

    async with serving() as server:
        decoded.clear()
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(flood, server)

    assert set(statuses) <= {Status.INVALID_ARGUMENT, Status.RESOURCE_EXHAUSTED}
    assert 8 == len(statuses)
    assert [] == decoded


async def test_one_connection_too_many_closes_the_one_silent_for_longest() -> None:
    """
    For one connection too many, the one that was silent for longest is closed. It is never the kubelet's, which has
    listened for longer than any; every new connection is accepted.
    """
    async with serving() as server, kubelet_of(server) as kubelet:
        with ExitStack() as held, structlog.testing.capture_logs() as logs:
            idle = []
            for _ in range(2 * MOST_CONNECTIONS):
                idle.append(connected(server, held))
                await until(lambda: server.connections != set() and answered(idle[-1]))
            await until(lambda: answered(idle[MOST_CONNECTIONS], hung_up=True))
            first = [not answered(one, hung_up=True) for one in idle]
            with closing(Channel(path=str(server.path))) as fresh:
                await v1beta1.DevicePluginStub(fresh).get_device_plugin_options(v1beta1.Empty())
            assert 1 == len((await kubelet.allocate(GPU_0)).container_responses)

        assert [False] * (MOST_CONNECTIONS + 1) + [True] * (MOST_CONNECTIONS - 1) == first
        assert 1 == len([line for line in logs if line["event"] == "connection closed"])


def answered(one: socket.socket, hung_up: bool = False) -> bool:
    """Whether the server has said anything (its settings), or, with `hung_up`, whether it has closed the connection."""
    try:
        data = one.recv(2**16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return data == b"" if hung_up else True


async def test_a_word_of_a_peer_keeps_its_connection_and_pings_do_not() -> None:
    async with serving() as server:
        with ExitStack() as held:
            speaking, pinging = connected(server, held), connected(server, held)
            for one in (speaking, pinging):
                await sent(one, HELLO)
                await until(lambda one=one: answered(one))  # type: ignore[misc]  # not inferred for defaults
            for _ in range(MOST_CONNECTIONS - 2):
                connected(server, held).send(HELLO)
            await until(lambda: len(server.connections) == MOST_CONNECTIONS)
            for one, word in (
                (pinging, frame(FrameType.PING, bytes(8))),
                (speaking, call("GetDevicePluginOptions", 1, EMPTY)),
            ):
                await until(lambda: not any(len(each.frames) for each in server.connections))
                assert still_open(one)  # which reads what came before
                one.send(word)
                await until(lambda one=one: answered(one))  # type: ignore[misc]  # not inferred for defaults
            connected(server, held).send(HELLO)
            await until(lambda: not still_open(pinging))

            assert still_open(speaking)


async def test_of_two_processes_the_one_with_more_connections_makes_room() -> None:
    """Else one that connects again and again, and talks all the time, would push out whoever has come to ask one thing."""
    async with serving() as server:
        with ExitStack() as held:
            quiet = connected(server, held)
            await until(lambda: len(server.connections) == 1)
            (guard,) = server.connections
            guard.peer = unix_sockets.Peer(os.getpid() + 1, 0)
            for _ in range(2 * MOST_CONNECTIONS):
                one = connected(server, held)
                await sent(one, HELLO + call("GetDevicePluginOptions", 1, EMPTY))
                await until(lambda one=one: answered(one))  # type: ignore[misc]  # not inferred for defaults

            assert still_open(quiet)


def still_open(one: socket.socket) -> bool:
    try:
        while one.recv(2**16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


async def test_other_streams_are_served_beside_the_kubelets() -> None:
    """Other streams are served beside the kubelet's, and none ends another."""
    allocator = MemoryAllocator(two_nodes())
    async with node(allocator=allocator, clock=ManualClock()) as it:
        plugin = it.front.plugins[GPU]
        kubelets = plugin.service.watch
        channels = [Channel(path=str(plugin.path)) for _ in range(MOST_OTHERS + 1)]
        streams = [v1beta1.DevicePluginStub(channel).list_and_watch(v1beta1.Empty()) for channel in channels]
        for stream in streams[:-1]:
            assert 8 == len((await anext(stream)).devices)
        with pytest.raises(GRPCError) as refused:
            await anext(streams[-1])
        allocator.judge({DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 7)
        for stream in streams[:-1]:
            assert 1 == len([d for d in (await anext(stream)).devices if d.health == "Unhealthy"])
        for channel in channels:
            channel.close()
        await all_tasks_blocked()

        assert Status.RESOURCE_EXHAUSTED is refused.value.status
        assert kubelets is plugin.service.watch
        assert kubelets.open
        assert 1 == it.kubelet.plugins.registrations // 2
        assert it.front.reason() is None


async def test_the_end_of_the_kubelets_stream_is_noticed_while_others_listen_on() -> None:
    """Else nobody would register anew, and no pod would get a GPU any more."""
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        plugin = it.front.plugins[GPU]
        with closing(Channel(path=str(plugin.path))) as channel:
            other = v1beta1.DevicePluginStub(channel).list_and_watch(v1beta1.Empty())
            await anext(other)
            it.kubelet.plugins.endpoints[GPU].stop(clock.monotonic())
            await plugin.service.watch.ended.wait()
            await clock.advance(5)
            await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)

            assert 2 == it.kubelet.plugins.registrations
            assert [] == [message async for message in other]  # all end before a registration


async def test_a_stream_that_is_there_first_is_not_taken_for_the_kubelets() -> None:
    """
    Who opens one while the kubelet is registering us, and has not dialled back, is less like it. Before the next
    registration both end: a kubelet drops its newest client when a former stream ends.
    """
    allocator = MemoryAllocator(two_nodes())
    service = DevicePlugin(GPU, allocator)
    with short_directory() as directory, closing(Channel(path=str(directory / "p.sock"))) as kubelet:
        server = GrpcServer(service, directory / "p.sock", "directory")
        await server.listen()
        with closing(Channel(path=str(server.path))) as other, service.watches.registering():
            early = v1beta1.DevicePluginStub(other).list_and_watch(v1beta1.Empty())
            await anext(early)
            taken = service.watch
            stub = v1beta1.DevicePluginStub(kubelet)
            await stub.get_device_plugin_options(v1beta1.Empty())
            stream = stub.list_and_watch(v1beta1.Empty())
            await anext(stream)

            assert taken is not service.watch
            assert (True, True) == (taken.open, service.watch.open)
            await service.watches.end()
            assert (False, False) == (taken.open, service.watch.open)
        await server.stop(5)


async def test_calls_that_are_reset_at_once_leave_nothing_and_end_the_connection() -> None:
    """grpclib itself keeps each of them for ever, as it never comes to run."""
    async with serving() as server, kubelet_of(server) as kubelet:
        with ExitStack() as held:
            one, kept, n = connected(server, held), 0, 0
            await sent(one, HELLO)
            await until(lambda: len(server.connections) == 2)
            (guard,) = {each for each in server.connections if not server.servicer.favours(each)}
            while await sent(one, call("Allocate", 2 * n + 1) + frame(FrameType.RESET, bytes(4), 0, 2 * n + 1)):
                kept, n = max(kept, len(guard.processor.streams)), n + 1
            assert 1 == len((await kubelet.allocate(GPU_0)).container_responses)

    assert kept <= 16
    assert n <= 5 * MOST_CONTROLS // CONTROLS_PER_RESET
    assert 0 == len(server.arriving)


@pytest.mark.parametrize("how", ["reset", "cut"])
async def test_calls_ended_from_outside_leave_nothing_to_the_garbage_collector(how: str) -> None:
    """
    Calls that are ended from outside leave nothing to the garbage collector. A flood of them would stop everything for
    tenths of a second whenever it searches for unreachable objects.
    """
    large = frame(FrameType.DATA, struct.pack(">?I", False, 10**6) + bytes(4_000), 0, 0)
    async with serving() as server:
        with ExitStack() as held:
            one, calls = connected(server, held), 50
            await sent(one, HELLO)
            await until(lambda: len(server.connections) == 1)
            (guard,) = server.connections
            gc.collect()
            gc.disable()
            try:
                for n in range(1, 2 * calls, 2):
                    before = guard.connection.streams_started
                    begun = call("GetDevicePluginOptions", n)
                    await sent(one, begun + (large[:5] + n.to_bytes(4) + large[9:] if how == "cut" else b""))
                    await until(lambda before=before: guard.connection.streams_started > before)  # type: ignore[misc]  # not inferred for defaults
                    if how == "reset":
                        await anyio.lowlevel.checkpoint()
                        await sent(one, frame(FrameType.RESET, bytes(4), 0, n))
                    await until(lambda: not guard.processor.streams)
                left = gc.collect()
            finally:
                gc.enable()

    assert left < calls


async def test_a_peer_that_reads_nothing_is_not_worked_for() -> None:
    """Its pings would be answered into memory without end, a few thousand in each ten seconds."""
    async with serving() as server, kubelet_of(server) as kubelet:
        with ExitStack() as held:
            one, refusals = connected(server, held), 0
            one.send(HELLO)
            await until(lambda: len(server.connections) == 2)
            (guard,) = {each for each in server.connections if not server.servicer.favours(each)}
            most = 0
            while refusals < 300:  # what is read at once takes some 180 turns
                guard.frames.controls = 0  # as after a look
                try:
                    one.send(frame(FrameType.PING, bytes(8)) * 500)
                    refusals = 0
                except BlockingIOError:
                    refusals += 1
                    await anyio.lowlevel.checkpoint()
                most = max(most, guard.transport.get_write_buffer_size() + len(guard.frames))
                assert most <= 2**17
            assert 1 == len((await kubelet.allocate(GPU_0)).container_responses)

        assert most > 2**16  # it got so far


async def test_a_peer_that_reads_again_is_worked_for_again() -> None:
    async with serving() as server:
        with ExitStack() as held:
            one, blocked = connected(server, held), False
            one.send(HELLO)
            await until(lambda: len(server.connections) == 1)
            (guard,) = server.connections
            guard.pause_writing()
            one.send(call("GetDevicePluginOptions", 1, EMPTY))
            await until(lambda: len(guard.frames) > 0)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            blocked = len(server.arriving) == 0
            guard.resume_writing()
            await until(lambda: len(guard.frames) == 0)

            assert blocked


async def test_a_peer_cannot_make_our_tables_grow() -> None:
    async with serving() as server:
        with ExitStack() as held:
            one = connected(server, held)
            await sent(one, HELLO + frame(FrameType.SETTINGS, struct.pack(">HI", 1, 2**32 - 1)))
            await until(lambda: len(server.connections) == 1)
            (guard,) = server.connections
            await until(lambda: guard._h2.remote_settings.header_table_size == 2**32 - 1)

            assert guard._h2.encoder.header_table_size <= TABLE_BYTES


@pytest.mark.parametrize("content", [b"\x82" * 15_000, b"\x40\x01x\x7f\x81\x1e" + b"a" * 4_000 + b"\xbe" * 10_000])
async def test_headers_that_unfold_to_megabytes_close_the_connection(content: bytes) -> None:
    async with serving() as server, kubelet_of(server) as kubelet:
        with ExitStack() as held:
            one = connected(server, held)
            await sent(one, HELLO + frame(FrameType.HEADERS, content, END_HEADERS, 1))
            await until(lambda: not still_open(one))

        assert 1 == len((await kubelet.allocate(GPU_0)).container_responses)


def test_what_is_wrong_with_peers_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = Complaints("p.sock")
    now = 5.0
    monkeypatch.setattr(transport, "monotonic", lambda: now)
    with structlog.testing.capture_logs() as logs:
        for _ in range(1_000):
            complaints.report("connection closed", "not gRPC", error="noise")
        complaints.report("connection refused", "peer runs as uid 7")
        now += transport.AGAIN_SECONDS
        complaints.report("connection closed", "not gRPC", error="noise")

    assert ["not gRPC", "peer runs as uid 7", "not gRPC"] == [line["reason"] for line in logs]


def test_causes_without_end_are_not_logged_without_end() -> None:
    complaints = Complaints("p.sock")
    with structlog.testing.capture_logs() as logs:
        for uid in range(1_000):
            complaints.report("connection refused", f"peer runs as uid {uid}")

    assert len(logs) <= 64


def test_all_that_is_held_of_requests_and_waits_is_a_few_megabytes() -> None:
    """The bounds by their product, for each socket: what is read and not handled, and what is arriving."""
    waiting = MOST_CONNECTIONS * 2 * (grpc_connection.CHUNK + 9)

    assert waiting + arriving.MOST_BYTES < 20 * 2**20
