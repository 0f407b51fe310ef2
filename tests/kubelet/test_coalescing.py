"""The frames of an answer are sent in one piece, when the last one is written."""

from asyncio import Transport
from collections.abc import Iterator

import pytest
from grpclib.client import Channel
from hypothesis import given
from hypothesis import strategies as st
from kubelet_support import serving

from topoalign.kubelet.grpc import grpc_connection
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.grpc_connection import (
    DATA,
    END_STREAM,
    HEADERS,
    MOST_BYTES,
    CoalescingTransport,
    ends_stream,
)
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


SETTINGS, WINDOW_UPDATE = 4, 8
END_HEADERS = 4


def frame(kind: int, flags: int = 0, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3) + bytes([kind, flags]) + (1).to_bytes(4) + content


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

    written = [frame(HEADERS, END_HEADERS, b"200"), frame(DATA, 0, b"devices"), frame(DATA, 0, b"more")]
    for each in written:
        transport.write(each)

    assert [] == wire.sent
    await a_round()
    assert [b"".join(written)] == wire.sent
    transport.write(written[1])
    await a_round()
    assert [b"".join(written), written[1]] == wire.sent


async def test_an_answer_that_ends_does_not_wait_for_the_round() -> None:
    wire = Wire()
    transport = CoalescingTransport(wire)

    answer = [frame(WINDOW_UPDATE), frame(HEADERS, END_HEADERS), frame(DATA, 0, b"m"), frame(HEADERS, END_STREAM)]
    for each in answer:
        assert [] == wire.sent
        transport.write(each)

    assert [b"".join(answer)] == wire.sent
    await a_round()
    assert 1 == len(wire.sent)


@given(
    before=st.lists(
        st.builds(
            frame,
            st.sampled_from([DATA, HEADERS, SETTINGS, WINDOW_UPDATE]),
            st.sampled_from([0, END_HEADERS]),
            st.binary(max_size=300),
        )
    ),
    ends=st.booleans(),
)
def test_the_last_frame_of_a_stream_is_found_among_others(before: list[bytes], ends: bool) -> None:
    last = [frame(HEADERS, END_STREAM | END_HEADERS, b"grpc-status: 0")] if ends else []

    assert ends == ends_stream(b"".join([*before, *last, *before]))
    assert not ends_stream(b"".join(before) + frame(SETTINGS, 1))


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

    monkeypatch.setattr(grpc_connection, "CoalescingTransport", Observed)
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
