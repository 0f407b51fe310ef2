"""Protobuf that is put together by hand is what protobuf is."""

import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import field, field_at, iterate_fields, number_field

NUMBERS = st.integers(0, 2**63 - 1)


@given(NUMBERS)
def test_a_number_is_written_as_the_codec_writes_it(number: int) -> None:
    assert bytes(v1beta1.NumaNode(id=number)) == number_field(1, number)


@given(st.lists(st.tuples(st.integers(1, 15), st.binary(max_size=300)), max_size=5))
def test_fields_are_read_as_they_were_written(written: list[tuple[int, bytes]]) -> None:
    message = b"".join(field(number, content) for number, content in written)

    found = iterate_fields(message, 0, len(message), v1beta1.Empty)

    assert written == [(each.number, message[each.content : each.end]) for each in found]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x0a", "no fields"),
        (b"\x0a\x05ab", "ends early"),
        (b"\x0a\xff", "no fields"),
        (b"\x0b\x01", "no fields"),
        (b"\x0d\x01", "ends early"),
    ],
)
def test_what_is_no_field_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(GRPCError, match=why):
        field_at(message, 0, len(message), v1beta1.Empty)
