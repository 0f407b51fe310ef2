"""The gRPC server on its socket, left alone with whoever connects."""

import errno
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import grpc
import pytest
import structlog
from betterproto2 import Message
from device_allocations_support import MemoryAllocator
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.config import H2Configuration
from h2.connection import H2Connection
from kubelet_support import serving, short_directory, two_nodes

from topoalign.allocator.device_plugin.plugin_server import MOST_OTHERS, DevicePlugin
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc import decoding, grpc_connection, transport, unix_sockets
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import LARGEST_REQUEST, MOST_BYTES, SMALL_REQUEST
from topoalign.kubelet.grpc.decoding import PIECE, Decoding
from topoalign.kubelet.grpc.grpc_connection import LONGEST_HEADERS, MOST_CONTROLS, MOST_SETTINGS, SILENT_LOOKS
from topoalign.kubelet.grpc.transport import MOST_CONNECTIONS, GrpcServer
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
ONE_GPU = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["GPU-0"])])


@asynccontextmanager
async def client(server: GrpcServer) -> AsyncIterator[v1beta1.DevicePluginStub]:
    channel = Channel(path=str(server.path))
    try:
        yield v1beta1.DevicePluginStub(channel)
    finally:
        channel.close()


async def refused(call: Callable[[], Awaitable[object]]) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        await call()
    return caught.value


async def test_a_request_too_large_is_refused_while_it_arrives() -> None:
    """
    A request that is too large is refused while it arrives, and others are served. 64 MiB would cost seconds of the
    event loop and 200 MB if they were read first.
    """
    huge = v1beta1.AllocateRequest(
        container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["x" * LARGEST_REQUEST, "y" * 2**26])]
    )
    async with serving() as server, client(server) as stub:
        error = await refused(lambda: stub.allocate(huge))
        assert Status.RESOURCE_EXHAUSTED is error.status
        assert 1 == len((await stub.allocate(ONE_GPU)).container_responses)


async def test_the_largest_request_that_is_taken_is_read_whole() -> None:
    large = v1beta1.AllocateRequest(
        container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["x" * (LARGEST_REQUEST - 100)])]
    )
    async with serving() as server, client(server) as stub:
        assert Status.INVALID_ARGUMENT is (await refused(lambda: stub.allocate(large))).status


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\x05\x0a\x03\xff\xfe\xfd",  # an id that is not UTF-8
        b"\x0a\x7f\x0a",  # cut short
        b"\xff" * 40,
        b"\x0b\x0c",  # a group where a message belongs
        b"\x0a\x02\x08\x07",  # a number where an id belongs
    ],
    ids=["not-utf8", "truncated", "noise", "group", "number"],
)
async def test_bytes_that_are_no_request_are_the_callers_fault(body: bytes) -> None:
    allocator = MemoryAllocator(two_nodes())
    async with serving(DevicePlugin(GPU, allocator)) as server:
        status, message = await raw_call(server, ALLOCATE, struct.pack(">?I", False, len(body)) + body)

        assert str(Status.INVALID_ARGUMENT.value) == status
        assert message.isprintable()
        assert {} == allocator.state.allocations


async def test_a_request_that_ends_before_it_is_whole_is_the_callers_fault() -> None:
    async with serving() as server:
        status, _ = await raw_call(server, ALLOCATE, struct.pack(">?I", False, 100) + b"short")

        assert str(Status.INVALID_ARGUMENT.value) == status


async def test_a_compressed_request_is_said_not_to_be_understood() -> None:
    async with serving() as server:
        status, _ = await raw_call(server, ALLOCATE, struct.pack(">?I", True, 3) + b"abc")

        assert str(Status.UNIMPLEMENTED.value) == status


async def test_a_method_that_is_not_there_is_unimplemented_to_every_client() -> None:
    """Without a content type, which grpclib itself leaves out here, a client reports a fault of the transport instead."""
    async with serving() as server:
        channel = Channel(path=str(server.path))
        method = channel.request("/v1beta1.DevicePlugin/Format", Cardinality.UNARY_UNARY, v1beta1.Empty, v1beta1.Empty)
        with pytest.raises(GRPCError) as ours:
            async with method as stream:
                await stream.send_message(v1beta1.Empty(), end=True)
                await stream.recv_message()
        channel.close()
        async with grpc.aio.insecure_channel(f"unix://{server.path}") as other:
            with pytest.raises(grpc.aio.AioRpcError) as theirs:
                await other.unary_unary("/v1beta1.DevicePlugin/Format")(b"")

        assert Status.UNIMPLEMENTED is ours.value.status
        assert grpc.StatusCode.UNIMPLEMENTED is theirs.value.code()


async def test_a_bad_timeout_and_a_foreign_content_type_are_refused() -> None:
    """A bad timeout and a foreign content type are refused, and other requests are served."""
    async with serving() as server, client(server) as stub:
        timeout = await raw_headers(server, ALLOCATE, b"", **{"grpc-timeout": "soon"})
        kind = await raw_headers(server, ALLOCATE, b"{}", **{"content-type": "application/json"})

        assert str(Status.UNKNOWN.value) == timeout["grpc-status"]
        assert "415" == kind[":status"]
        assert 1 == len((await stub.allocate(ONE_GPU)).container_responses)


async def test_of_64_mebibytes_no_more_is_read_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is decoded, and what comes after the refusal is dropped unread: the loop's work is bounded."""
    decoded: list[int] = []
    held: list[int] = []
    handle = grpc_connection.GrpcConnection.handle

    class Counting(Decoding):
        def __init__(self, data: bytes, kind: type[Message]) -> None:
            decoded.append(len(data))
            super().__init__(data, kind)

    def weighing(self: grpc_connection.GrpcConnection) -> None:
        handle(self)
        held.append(len(self.frames) + self.server.arriving.size)

    monkeypatch.setattr(decoding, "Decoding", Counting)
    monkeypatch.setattr(grpc_connection.GrpcConnection, "handle", weighing)
    huge = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["x" * 2**26])])
    async with serving() as server, client(server) as stub:
        decoded.clear()
        assert Status.RESOURCE_EXHAUSTED is (await refused(lambda: stub.allocate(huge))).status

    assert [] == decoded
    assert LARGEST_REQUEST / 2 <= max(held) <= LARGEST_REQUEST + 2**20


async def test_while_a_large_request_is_decoded_others_are_answered() -> None:
    """Twenty thousand devices are 20 turns of decoding; a call on another connection comes in between."""
    answered: list[str] = []
    ids = [f"GPU-{i}" for i in range(20_000)]
    large = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=ids)])
    begun = anyio.Event()

    class Observed(Decoding):
        def step(self) -> Message | None:
            begun.set()
            return super().step()

    async with serving() as server, client(server) as first, client(server) as second, anyio.create_task_group() as it:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(decoding, "Decoding", Observed)

            async def refused_at_last() -> None:
                assert Status.INVALID_ARGUMENT is (await refused(lambda: first.allocate(large))).status
                answered.append("large")

            it.start_soon(refused_at_last)
            await begun.wait()
            assert 1 == len((await second.allocate(ONE_GPU)).container_responses)
            answered.append("small")

    assert ["small", "large"] == answered


async def test_a_thousand_idle_connections_cost_their_owner_and_nobody_else() -> None:
    """There are never more than the limit, and calls are served throughout."""
    async with serving() as server, client(server) as stub:
        await stub.get_device_plugin_options(v1beta1.Empty())
        with ExitStack() as held:
            most = 0
            for _ in range(1_000):
                one = held.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                while one.connect_ex(str(server.path)) == errno.EAGAIN:  # the queue is full: it empties in our loop
                    await anyio.lowlevel.checkpoint()
                most = max(most, len(server.connections))
            assert 1 == len((await stub.allocate(ONE_GPU)).container_responses)

        assert MOST_CONNECTIONS == most


async def test_noise_closes_its_own_connection_only() -> None:
    async with serving() as server, client(server) as stub:
        async with await anyio.connect_unix(str(server.path)) as noise:
            await noise.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 40)
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                while True:
                    await noise.receive()

        assert 1 == len((await stub.allocate(ONE_GPU)).container_responses)


FOREIGN = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(3):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(sys.argv[1])
        try:
            peer.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
            while peer.recv(4096):
                pass
        except ConnectionError:
            pass
print("refused", os.getuid())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_process_of_another_user_is_not_served_and_logged_once() -> None:
    """
    A connection of another user's process is closed before it is served, and logged once, even where the mode of the
    socket would let it in. Its requests reach nobody.
    """
    allocator = MemoryAllocator(two_nodes())
    async with serving(DevicePlugin(GPU, allocator)) as server:
        os.chmod(server.path.parent, 0o755)
        os.chmod(server.path, 0o666)
        with structlog.testing.capture_logs() as logs:
            child = await anyio.run_process([sys.executable, "-c", FOREIGN, str(server.path)], check=False)

        assert b"refused 65534" == child.stdout.strip()
        assert ["peer runs as uid 65534"] == [line["reason"] for line in logs]
        assert not server.connections
        assert {} == allocator.state.allocations


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_the_mode_of_the_socket_keeps_a_process_of_another_user_out() -> None:
    """A process of another user does not get past the mode of the socket."""
    async with serving() as server:
        os.chmod(server.path.parent, 0o755)
        child = await anyio.run_process([sys.executable, "-c", FOREIGN, str(server.path)], check=False)

        assert b"PermissionError" in child.stderr


async def test_the_list_of_a_stream_that_cannot_be_sent_to_ends_with_its_call() -> None:
    """
    The list of a stream that cannot be sent to has ended when the call has, not whenever it is collected: what held it
    goes on holding it for as long as somebody looks at the error.
    """
    ended: list[bool] = []

    class Gone:
        async def send_message(self, message: object) -> None:
            raise StreamTerminatedError("the client has gone")

    async def messages(request: object) -> AsyncIterator[object]:
        try:
            yield request
        finally:
            ended.append(True)

    with pytest.raises(StreamTerminatedError) as caught:
        await DevicePlugin(GPU, MemoryAllocator(two_nodes()))._call_rpc_handler_server_stream(messages, Gone(), None)

    assert [True] == ended, caught.value


async def test_a_connection_that_has_gone_is_not_looked_after_any_more() -> None:
    async with serving() as server:
        async with await anyio.connect_unix(str(server.path)) as peer:
            await peer.receive()  # the server's settings: it has us
            (guard,) = server.connections
            look = guard.next_look
        while server.connections:
            await anyio.lowlevel.checkpoint()

        assert look is not None and look.cancelled()


async def test_stopping_lets_a_call_that_has_begun_end_and_takes_no_new_one() -> None:
    allocator = MemoryAllocator(two_nodes())
    allocator.pause = anyio.Event()
    answers: list[v1beta1.AllocateResponse] = []
    async with (
        serving(DevicePlugin(GPU, allocator)) as server,
        client(server) as stub,
        anyio.create_task_group() as tasks,
    ):

        async def call() -> None:
            answers.append(await stub.allocate(ONE_GPU))

        tasks.start_soon(call)
        await allocator.started.wait()
        tasks.start_soon(server.stop, 60)
        await all_tasks_blocked()
        assert not server.path.exists()
        assert [] == answers
        allocator.pause.set()

    assert {"NVIDIA_VISIBLE_DEVICES": "GPU-0"} == answers[0].container_responses[0].envs


async def test_a_call_that_does_not_end_does_not_hold_the_stop_for_ever() -> None:
    allocator = MemoryAllocator(two_nodes())
    allocator.pause = anyio.Event()
    async with (
        serving(DevicePlugin(GPU, allocator)) as server,
        client(server) as stub,
        anyio.create_task_group() as tasks,
    ):

        async def call() -> None:
            with pytest.raises((GRPCError, StreamTerminatedError)):
                await stub.allocate(ONE_GPU)

        tasks.start_soon(call)
        await allocator.started.wait()
        await server.stop(0.01)

    assert {} == allocator.state.allocations


async def test_a_stale_socket_is_replaced_and_a_live_one_names_its_process() -> None:
    async with serving() as server:
        with pytest.raises(StateFault, match=f"process {os.getpid()} already serves"):
            unix_sockets.listen_on_path(server.path, "directory")
    with short_directory() as directory:
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(directory / "p.sock"))
        stale.close()

        unix_sockets.listen_on_path(directory / "p.sock", "directory").close()


async def test_a_socket_whose_queue_is_full_is_a_live_one() -> None:
    with short_directory() as directory, ExitStack() as held:
        path = directory / "p.sock"
        busy = held.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        full = False
        while not full:
            one = held.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            full = one.connect_ex(str(path)) == errno.EAGAIN
        with pytest.raises(StateFault, match="another process already serves"):
            unix_sockets.listen_on_path(path, "directory")


async def test_two_that_make_a_socket_in_one_directory_do_not_do_it_at_once() -> None:
    """Else both could find the place empty, and one of them serve where nobody comes."""
    with short_directory() as directory:
        with (
            unix_sockets.directory_lock(directory),
            pytest.raises(StateFault, match="another process is making a socket"),
        ):
            unix_sockets.listen_on_path(directory / "p.sock", "directory")
        unix_sockets.listen_on_path(directory / "p.sock", "directory").close()


async def test_a_socket_that_has_become_anothers_is_not_removed_when_we_stop() -> None:
    async with serving() as server:
        server.path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(server.path))
        await server.stop(5)

        assert server.path.exists()
        other.close()


KEPT = """
import os, sys
from pathlib import Path
from topoalign.kubelet.grpc import unix_sockets
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = Path(sys.argv[1])
listening = unix_sockets.listen_on_path(path, "directory")
path.parent.chmod(0o500)
unix_sockets.remove_socket(path, unix_sockets.identity(path))
print("still there", path.exists())
"""


async def test_a_directory_that_became_read_only_does_not_prevent_a_stop() -> None:
    """
    A directory from which nothing can be removed any more does not keep the server from stopping. A disk may have
    become read-only. The socket is found stale by the next server.
    """
    with short_directory() as directory:
        theirs = directory / "theirs"
        theirs.mkdir()
        if os.geteuid() == 0:
            directory.chmod(0o755)
            os.chown(theirs, 65534, 65534)
        child = await anyio.run_process([sys.executable, "-c", KEPT, str(theirs / "p.sock")], check=False)
        theirs.chmod(0o700)

        assert (b"still there True", b"") == (child.stdout.strip(), child.stderr.strip())


async def test_a_silent_peer_is_pinged_within_seconds() -> None:
    """grpclib's own default is after two hours."""
    config = transport.KEEPALIVE.__for_server__()

    assert config._keepalive_time is not None and config._keepalive_time <= 10
    assert config._keepalive_permit_without_calls


async def test_a_peer_that_answers_no_pings_is_hung_up_on_at_the_third_look() -> None:
    """Not at the first: this process may have been stopped, and has not read yet what came meanwhile."""
    async with serving() as server, await anyio.connect_unix(str(server.path)) as peer:
        await peer.receive()  # the server's settings: it has us
        (guard,) = server.connections
        for _ in range(SILENT_LOOKS - 1):
            guard.look()
        await peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with anyio.fail_after(30):
            while guard.silent:
                await anyio.lowlevel.checkpoint()
        for _ in range(SILENT_LOOKS - 1):
            guard.look()
        assert {guard} == server.connections
        guard.look()
        with anyio.fail_after(30), pytest.raises(anyio.EndOfStream):
            while True:
                await peer.receive()
        assert set() == server.connections


async def raw_call(server: GrpcServer, method: str, body: bytes) -> tuple[str, str]:
    """One call with a body of our own making; its grpc-status and grpc-message."""
    answer = await raw_headers(server, method, body)
    return answer["grpc-status"], answer.get("grpc-message", "")


async def raw_headers(server: GrpcServer, method: str, body: bytes, **more: str) -> dict[str, str]:
    """One call with a body and headers of our own making; all headers and trailers of the answer."""
    h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    h2.initiate_connection()
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    h2.send_headers(1, list((dict(headers) | more).items()))
    h2.send_data(1, body, end_stream=True)
    answer: dict[str, str] = {}
    async with await anyio.connect_unix(str(server.path)) as stream:
        await stream.send(h2.data_to_send())
        while "grpc-status" not in answer:
            for event in h2.receive_data(await stream.receive()):
                answer.update(getattr(event, "headers", None) or {})
    return answer


def test_the_limits_on_the_page_are_those_that_hold() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubelet-contract.md").read_text()
    limits = {
        "connections to one socket": f"{MOST_CONNECTIONS}",
        "a request that names devices": f"{LARGEST_REQUEST >> 20} MiB",
        "any other request": f"{SMALL_REQUEST >> 10} KiB",
        "all requests that arrive": f"{MOST_BYTES >> 20} MiB",
        "calls at a time on one connection": f"{grpc_connection.MOST_CALLS}",
        "headers of a request": f"{LONGEST_HEADERS >> 10} KiB",
        "frames that carry no request": f"{MOST_CONTROLS:,} in 10 s",
        "frames of settings": f"{MOST_SETTINGS}",
        "ListAndWatch streams beside the kubelet's": f"{MOST_OTHERS}",
        "names decoded at once": f"{PIECE:,}",
        "a silent peer": f"pinged every {grpc_connection.PING_SECONDS:g} s",
        "containers in a request": f"{MOST_CONTAINERS}",
    }

    assert [] == [f"{name}: {value}" for name, value in limits.items() if f"| {name} | {value} |" not in page]
