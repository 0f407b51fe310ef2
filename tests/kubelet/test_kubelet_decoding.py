"""Large requests are decoded a piece at a time, and mean what they mean to the generated code."""

from functools import partial

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import MOST_NAMES
from topoalign.kubelet.grpc.codec import CODEC
from topoalign.kubelet.grpc.decoding import NAMING, PIECE, Decoding
from topoalign.kubelet.grpc.protobuf import field, varint

pytestmark = pytest.mark.anyio
NAMES = st.lists(st.text(min_size=1, max_size=60), max_size=5).flatmap(
    lambda names: st.integers(1, 150).map(lambda times: names * times)
)
ALLOCATE = st.lists(st.builds(v1beta1.ContainerAllocateRequest, devices_ids=NAMES), max_size=3).map(
    lambda each: v1beta1.AllocateRequest(container_requests=each)
)
PREFER = st.lists(
    st.builds(
        v1beta1.ContainerPreferredAllocationRequest,
        available_deviceIDs=NAMES,
        must_include_deviceIDs=NAMES,
        allocation_size=st.integers(-(2**31), 2**31 - 1),
    ),
    max_size=3,
).map(lambda each: v1beta1.PreferredAllocationRequest(container_requests=each))
START = st.builds(v1beta1.PreStartContainerRequest, devices_ids=NAMES)


class Counted:
    """Turns that are there at once."""

    def __init__(self) -> None:
        self.turns = 0

    async def turn(self) -> None:
        self.turns += 1


async def pieces(data: bytes, kind: type, counted: Counted | None = None) -> object:
    return await Decoding(data, (counted or Counted()).turn).decode(kind)


@settings(max_examples=30, deadline=None)
@given(ALLOCATE | PREFER | START)
async def test_a_request_in_pieces_is_the_request(
    request: v1beta1.AllocateRequest | v1beta1.PreferredAllocationRequest | v1beta1.PreStartContainerRequest,
) -> None:
    assert request == await pieces(bytes(request), type(request))


@given(
    st.sampled_from(NAMING), ALLOCATE | PREFER | START, st.integers(0, 400), st.integers(0, 255), st.integers(1, 400)
)
async def test_damaged_bytes_are_refused_or_read_as_the_generated_code_does(
    kind: type, request: v1beta1.AllocateRequest, position: int, byte: int, cut: int
) -> None:
    """
    Damaged bytes are refused or read as the generated code reads them, except that a device without a name is refused
    here, and in small requests by the called handler.
    """
    damaged = bytearray(bytes(request)[:cut] or b"\n")
    damaged[position % len(damaged)] = byte
    whole = partial(CODEC.decode, bytes(damaged), kind)
    try:
        got = await pieces(bytes(damaged), kind)
    except GRPCError as error:
        assert Status.INVALID_ARGUMENT is error.status
        return

    assert whole() == got


async def test_forty_thousand_devices_are_decoded_in_four_hundred_turns() -> None:
    ids = [f"GPU-5c1b3f2a-8e4d-4b7a-9f60-0d2c7e9a1b00::{i}" for i in range(40_000)]
    counted = Counted()
    got = await pieces(
        bytes(v1beta1.PreStartContainerRequest(devices_ids=ids)), v1beta1.PreStartContainerRequest, counted
    )

    assert v1beta1.PreStartContainerRequest(devices_ids=ids) == got
    assert 40_000 // PIECE <= counted.turns <= 40_000 // PIECE + 1 + 40_000 // PIECE // 10


REFUSED = {
    "no names": field(1, b"\n\0" * 1_400_000),
    "a nameless one at the end": field(1, field(1, b"GPU-0") * 99 + b"\n\0"),
    "more names than there are devices": field(1, field(1, b"x") * (MOST_NAMES + 1)),
    "empty containers": b"\n\0" * 1_000_000,
    "too many containers": field(1, field(1, b"x")) * (MOST_CONTAINERS + 1),
    "numbers": field(1, b"\x38\x01" * (MOST_NAMES + 1)),
    "a length beyond the end": b"\n" + varint(2**40),
    "a group": b"\x0b" * 2_000,
    "noise": b"\xff" * 2_000,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_abnormal_request_costs_no_more_than_the_largest_normal_one(name: str) -> None:
    """A request that no kubelet sends costs no more than the largest request that a kubelet sends."""
    counted = Counted()
    with pytest.raises(GRPCError) as refused:
        await pieces(REFUSED[name], v1beta1.AllocateRequest, counted)

    assert Status.INVALID_ARGUMENT is refused.value.status
    assert counted.turns <= MOST_NAMES // PIECE + 1


@pytest.mark.parametrize("kind", NAMING)
async def test_fields_that_the_api_does_not_have_are_passed_over_in_turns(kind: type) -> None:
    counted = Counted()
    await pieces(varint(9 << 3) + b"\x01" + (varint(9 << 3) + b"\x01") * 9_999, kind, counted)

    assert 10_000 // PIECE <= counted.turns <= 10_000 // PIECE + 1


@pytest.mark.parametrize("kind", NAMING)
@pytest.mark.parametrize("before", [b"", varint(9 << 3), b"\n"])
async def test_a_number_of_more_than_ten_bytes_is_refused_however_long_it_is(kind: type, before: bytes) -> None:
    """Reading it to its end takes a time that grows with the square of its length: 1.9 s for 200 KB."""
    for data in (before + b"\x80" * 10 + b"\x01", before + b"\xff" * (2**22 - 8)):
        with pytest.raises(GRPCError) as refused:
            await pieces(data, kind)

        assert Status.INVALID_ARGUMENT is refused.value.status
