"""What is written to a connection in one round of the event loop is sent in one piece."""

from asyncio import Transport
from collections.abc import Iterator

import pytest
from grpclib.client import Channel
from hypothesis import given
from hypothesis import strategies as st
from kubelet_support import serving

from topoalign.kubelet.grpc import connection
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.coalescing import MOST_BYTES, CoalescingTransport
from topoalign.runtime.clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


def request_of(gpu: str) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=[gpu])])


class Wire(Transport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__({"peername": "kubelet"})
        self.sent: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


async def a_round() -> None:
    """Everything that is to be done now is done, and what that leaves for the end of the round."""
    for _ in range(2):
        await all_tasks_blocked()


async def test_what_is_written_in_one_round_is_sent_in_one_piece() -> None:
    wire = Wire()
    transport = CoalescingTransport(wire)

    for frame in (b"headers", b"message", b"trailers"):
        transport.write(frame)

    assert [] == wire.sent
    await a_round()
    assert [b"headersmessagetrailers"] == wire.sent
    transport.write(b"next")
    await a_round()
    assert [b"headersmessagetrailers", b"next"] == wire.sent


async def test_a_large_answer_does_not_wait_for_the_end_of_the_round() -> None:
    wire = Wire()
    transport = CoalescingTransport(wire)

    for _ in range(8):
        transport.write(b"x" * (MOST_BYTES // 4))

    assert [MOST_BYTES, MOST_BYTES] == [len(each) for each in wire.sent]
    await a_round()
    assert 2 == len(wire.sent)


async def test_a_connection_sends_what_is_written_before_it_closes() -> None:
    wire = Wire()
    transport = CoalescingTransport(wire)

    transport.write(b"goodbye")
    transport.close()
    await a_round()

    assert ([b"goodbye"], True) == (wire.sent, transport.is_closing())


async def test_nothing_is_sent_over_a_connection_that_is_closed() -> None:
    wire = Wire()
    transport = CoalescingTransport(wire)

    transport.write(b"too late")
    wire.close()
    await a_round()

    assert [] == wire.sent


async def test_a_peer_is_known_as_the_connection_knows_it() -> None:
    assert "kubelet" == CoalescingTransport(Wire()).get_extra_info("peername")


@given(rounds=st.lists(st.lists(st.integers(0, 2 * MOST_BYTES), max_size=6), max_size=6))
async def test_bytes_are_sent_in_the_order_in_which_they_are_written(rounds: list[list[int]]) -> None:
    wire, written = Wire(), bytearray()
    transport = CoalescingTransport(wire)

    for number, sizes in enumerate(rounds):
        for size in sizes:
            piece = bytes([number * 7 % 251]) * size
            transport.write(piece)
            written += piece
        await a_round()
        assert bytes(written) == b"".join(wire.sent)

    assert all(wire.sent)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What the server's connections send, piece by piece."""
    pieces: list[bytes] = []

    class Observed(CoalescingTransport):
        def flush(self) -> None:
            if self._written:
                pieces.append(bytes(self._written))
            super().flush()

    monkeypatch.setattr(connection, "CoalescingTransport", Observed)
    yield pieces


async def test_an_answer_is_sent_in_one_piece(sent: list[bytes]) -> None:
    async with serving() as server:
        channel = Channel(path=str(server.path))
        stub = v1beta1.DevicePluginStub(channel)
        await stub.allocate(request_of("GPU-0"))
        await a_round()
        sent.clear()

        await stub.allocate(request_of("GPU-1"))

        channel.close()
    assert 1 == len(sent)
