"""Protobuf that is put together by hand is what protobuf is."""

import betterproto2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import field, fields, number_field, varint

NUMBERS = st.integers(0, 2**63 - 1)


@given(NUMBERS)
def test_a_number_is_written_as_the_codec_writes_it(number: int) -> None:
    assert betterproto2.encode_varint(number) == varint(number)
    assert bytes(v1beta1.NumaNode(id=number)) == number_field(1, number)


@given(st.lists(st.tuples(st.integers(1, 15), st.binary(max_size=300)), max_size=5))
def test_fields_are_read_as_they_were_written(written: list[tuple[int, bytes]]) -> None:
    message = b"".join(field(number, content) for number, content in written)

    assert written == list(fields(message))


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_message_of_the_codec_is_read(endpoint: str, resource: str) -> None:
    told = dict(fields(bytes(v1beta1.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=resource))))

    assert (b"v1beta1", endpoint.encode(), resource.encode()) == (told[1], told.get(2, b""), told.get(3, b""))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x0a", "ends early"),
        (b"\x0a\x05ab", "ends early"),
        (b"\x0a\xff", "ends early"),
        (b"\x08\x01", "field 1 has wire type 0, not 2"),
    ],
)
def test_what_is_no_message_of_texts_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(fields(message))
