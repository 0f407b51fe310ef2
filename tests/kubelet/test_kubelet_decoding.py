"""Requests that name devices are decoded a piece at a time, and mean what they mean to the generated code."""

import pytest
from betterproto2 import Message, encode_varint
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import MOST_NAMES
from topoalign.kubelet.grpc.decoding import CODEC, FIRST_PIECE, NAMING, PIECE, Decoding, field, iterate_fields

NAMES = st.lists(st.text(min_size=1, max_size=60) | st.text(min_size=127, max_size=200), max_size=5).flatmap(
    lambda names: (
        st.integers(1, 3).map(lambda times: names * times) | st.integers(100, 300).map(lambda times: names * times)
    )
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
Request = v1beta1.AllocateRequest | v1beta1.PreferredAllocationRequest | v1beta1.PreStartContainerRequest


OTHERS = st.sampled_from(
    [
        field(9, b"GPU-1"),
        encode_varint(9 << 3) + encode_varint(2**63),
        encode_varint(9 << 3 | 1) + bytes(8),
        encode_varint(2_000 << 3 | 5) + bytes(4),
        encode_varint(2_000 << 3 | 2) + encode_varint(200) + bytes(200),
    ]
)
"""Fields that the API does not have."""


def pieces(data: bytes, kind: type) -> tuple[Message, int]:
    """The decoded request, and in how many pieces."""
    decoding = Decoding(data, kind)
    for count in range(1, MOST_NAMES):
        if (message := decoding.step()) is not None:
            return message, count
    raise AssertionError


def refused(data: bytes, kind: type) -> bool:
    try:
        pieces(data, kind)
    except GRPCError as error:
        assert Status.INVALID_ARGUMENT is error.status
        return True
    return False


@settings(max_examples=60)
@given(ALLOCATE | PREFER | START)
def test_every_request_is_read_as_the_generated_code_does(request: Request) -> None:
    assert request == pieces(bytes(request), type(request))[0]
    assert CODEC.decode(bytes(request), type(request)) == pieces(bytes(request), type(request))[0]


@settings(max_examples=60)
@given(st.data(), ALLOCATE | PREFER | START)
def test_fields_in_any_order_repeated_or_unknown_are_read_alike(data: st.DataObject, request: Request) -> None:
    """Fields in another order, twice or unknown, in a request and in its containers, are read as the generated code does."""
    containers = [] if isinstance(request, v1beta1.PreStartContainerRequest) else request.container_requests
    message = mixed(data, b"".join(field(1, mixed(data, bytes(each))) for each in containers) or bytes(request))

    assert CODEC.decode(message, type(request)) == pieces(message, type(request))[0]


def mixed(data: st.DataObject, message: bytes) -> bytes:
    """The fields of a message in another order, some twice, with unknown ones between."""
    fields = [message[each.start : each.end] for each in iterate_fields(message, 0, len(message), Message)]
    if len(fields) > 20:
        return b"".join([*fields, data.draw(OTHERS), *fields[:3]])
    return b"".join(data.draw(st.permutations([*fields, *fields[:3], *data.draw(st.lists(OTHERS, max_size=3))])))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_last_number_counts_and_has_32_bits(first: int, last: int) -> None:
    kind = v1beta1.PreferredAllocationRequest
    message = field(1, b"\x18" + encode_varint(first) + b"\x98\x00" + encode_varint(last))

    assert CODEC.decode(message, kind) == pieces(message, kind)[0]


def test_a_text_for_the_number_is_refused() -> None:
    assert refused(field(1, field(3, b"\x02")), v1beta1.PreferredAllocationRequest)


@given(
    st.sampled_from(NAMING), ALLOCATE | PREFER | START, st.integers(0, 400), st.integers(0, 255), st.integers(1, 400)
)
def test_damaged_bytes_are_refused_or_read_as_the_generated_code_does(
    kind: type, request: Request, position: int, byte: int, cut: int
) -> None:
    """
    Damaged bytes are refused or read as the generated code reads them. What it refuses is refused; of what it reads, a
    message that ends early, a group and a device without a name are refused here.
    """
    damaged = bytearray(bytes(request)[:cut] or b"\n")
    damaged[position % len(damaged)] = byte
    try:
        generated = CODEC.decode(bytes(damaged), kind)
    except GRPCError:
        assert refused(bytes(damaged), kind)
        return

    assert refused(bytes(damaged), kind) or generated == pieces(bytes(damaged), kind)[0]


def test_forty_thousand_devices_are_decoded_in_forty_pieces() -> None:
    ids = [f"GPU-5c1b3f2a-8e4d-4b7a-9f60-0d2c7e9a1b00::{i}" for i in range(40_000)]
    got, count = pieces(bytes(v1beta1.PreStartContainerRequest(devices_ids=ids)), v1beta1.PreStartContainerRequest)

    assert v1beta1.PreStartContainerRequest(devices_ids=ids) == got
    assert 40_000 // PIECE + 1 == count


REFUSED = {
    "no names": field(1, b"\n\0" * 1_400_000),
    "a nameless one at the end": field(1, field(1, b"GPU-0") * 99 + b"\n\0"),
    "a nameless one alone": field(1, b"\n\0"),
    "more names than there are devices": field(1, field(1, b"x") * (MOST_NAMES + 1)),
    "more names than there are devices, in two containers": field(1, field(1, b"x") * (MOST_NAMES // 2 + 1)) * 2,
    "empty containers": b"\n\0" * 1_000_000,
    "too many containers": field(1, field(1, b"x")) * (MOST_CONTAINERS + 1),
    "numbers": field(1, b"\x38\x01" * (MOST_NAMES + 1)),
    "a number for a name": field(1, b"\x08\x01"),
    "a number for a container": b"\x08\x01",
    "a length beyond the end": b"\n" + encode_varint(2**40),
    "a name that ends early": field(1, b"\n\x05GPU"),
    "a name without a length": field(1, b"\n"),
    "a name that is not UTF-8": field(1, field(1, b"GPU-\xff\xfe")),
    "a long name that is not UTF-8": field(1, field(1, b"x" * 200 + b"\xff\xfe")),
    "a field without a number": b"\x05abcd",
    "a group": b"\x0b" * 2_000,
    "noise": b"\xff" * 2_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_abnormal_request_costs_no_more_than_the_largest_normal_one(name: str) -> None:
    """A request that no kubelet sends costs no more than the largest request that a kubelet sends."""
    decoding, count = Decoding(REFUSED[name], v1beta1.AllocateRequest), 0
    with pytest.raises(GRPCError) as refused:
        while decoding.step() is None:
            count += 1

    assert Status.INVALID_ARGUMENT is refused.value.status
    assert count <= MOST_NAMES // PIECE


@pytest.mark.parametrize("kind", NAMING)
def test_fields_that_the_api_does_not_have_are_passed_over_in_turns(kind: type) -> None:
    _, count = pieces((encode_varint(9 << 3) + b"\x01") * 10_000, kind)

    assert 10_000 // PIECE + 1 == count


@pytest.mark.parametrize("kind", NAMING)
@pytest.mark.parametrize("before", [b"", encode_varint(9 << 3), b"\n"])
def test_a_number_of_more_than_ten_bytes_is_refused_however_long_it_is(kind: type, before: bytes) -> None:
    """Reading it to its end takes a time that grows with the square of its length: 1.9 s for 200 KB."""
    for data in (before + b"\x80" * 10 + b"\x01", before + b"\xff" * (2**22 - 8)):
        assert refused(data, kind)


@pytest.mark.parametrize(
    "count", [1, FIRST_PIECE - 1, FIRST_PIECE + 1, FIRST_PIECE + PIECE - 1, FIRST_PIECE + PIECE + 1]
)
def test_only_the_first_names_of_a_request_are_read_without_a_turn(count: int) -> None:
    """Those of most pods are: eight GPUs for each of eight containers."""
    names = [f"GPU-{number}" for number in range(count)]
    request = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=names)])
    turns = (count > FIRST_PIECE) + (count > FIRST_PIECE + PIECE)

    assert (request, 1 + turns) == pieces(bytes(request), v1beta1.AllocateRequest)
