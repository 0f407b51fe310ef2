"""What a follower reads of a message that a store delivers."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

from topoalign.core.model.errors import BusUnavailable
from topoalign.runtime.nats_bus.delivered import Delivered, parse_headers

NAME = st.text("abcXYZ-09", min_size=1, max_size=12)
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
LINE = st.one_of(
    st.tuples(NAME, VALUE).map(lambda pair: f"{pair[0]}: {pair[1]}".encode()),
    st.binary(max_size=20).filter(lambda line: b"\r" not in line and b"\n" not in line),
)


def head(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def delivered(headers: bytes, body: bytes = b"{}") -> Delivered:
    return Delivered(b"_INBOX.x", body, headers)


@given(st.lists(LINE, max_size=8))
@example([b":"])
def test_each_header_that_the_library_reads_is_read_alike(lines: list[bytes]) -> None:
    """The library ignores some that no client writes: names with spaces, and names that are not ASCII."""
    raw = head(*lines)
    read = parse_headers(raw)

    assert Client._parse_header_lines(raw.removeprefix(b"NATS/1.0\r\n")).items() <= read.items()
    assert not any(name.isascii() and name.isalnum() for name in read.keys() - Client._parse_header_lines(raw).keys())


@pytest.mark.parametrize(
    "line", [b"Nats-Msg-Id:17", b"Nats-Msg-Id : 17", b"Nats-Msg-Id:\t17", b"Nats-Msg-Id: 4\r\nNats-Msg-Id: 17"]
)
def test_a_header_in_another_form_is_found_too(line: bytes) -> None:
    assert "17" == parse_headers(head(b"X-Nats-Msg-Id: 3", line))["Nats-Msg-Id"]


def test_a_name_within_another_or_within_a_value_is_not_that_header() -> None:
    assert {"X-ce-id": "3", "note": "ce-id: 4"} == parse_headers(head(b"X-ce-id: 3", b"note: ce-id: 4"))


ADDED = (
    b"Nats-Stream: S",
    b"Nats-Subject: topoalign.v1.y",
    b"Nats-Sequence: 41",
    b"Nats-Time-Stamp: 2026-11-21T09:00:00Z",
    b"Nats-Num-Pending: 12",
    b"Nats-Last-Sequence: 40",
)


@given(st.dictionaries(NAME, VALUE, max_size=8))
def test_a_stored_message_is_as_it_was_published(pairs: dict[str, str]) -> None:
    lines = [f"{name}: {value}".encode() for name, value in pairs.items()]
    stored = delivered(head(*lines, *ADDED))
    there = stored.in_store()
    received = stored.received_at(there)

    assert stored.is_of_a_store
    assert not delivered(stored.head, body=b"").is_without_message
    assert (41, 40, 12, "topoalign.v1.y") == (
        received.position,
        there.before,
        received.waiting,
        received.message.subject,
    )
    assert received.message.headers == parse_headers(head(*lines))


def test_headers_that_only_look_like_those_of_a_store_are_the_writers() -> None:
    """The store adds its own behind it."""
    forged = [b"Nats-Stream: T", b"Nats-Sequence: 7", b"Nats-Subject: topoalign.v1.z"]
    stored = delivered(head(*forged, *ADDED))

    assert (41, b"S") == stored.in_store()[1::-1]
    assert "7" == stored.received_at(stored.in_store()).message.headers["Nats-Sequence"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_answer_without_a_place_in_a_store_is_read_again(missing: int) -> None:
    with pytest.raises(BusUnavailable, match="something else than a message"):
        delivered(head(*ADDED[:missing], *ADDED[missing + 1 :])).in_store()


def test_the_end_of_a_batch_has_how_many_wait_and_the_last_position() -> None:
    end = delivered(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 12\r\nNats-Last-Sequence: 41\r\n\r\n", body=b"")

    assert (12, 41) == end.after_batch
    assert (0, 0) == delivered(b"NATS/1.0 404 Message Not Found\r\n\r\n", body=b"").after_batch


def test_an_answer_without_a_message_has_a_number_and_a_text() -> None:
    answers = [
        delivered(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 1\r\n\r\n", body=b""),
        delivered(b"NATS/1.0 404 Message Not Found\r\n\r\n", body=b""),
        delivered(b"NATS/1.0 503\r\n\r\n", body=b""),
        delivered(b"", body=b""),
    ]

    assert all(each.is_without_message for each in answers)
    assert [("204", "EOB"), ("404", "Message Not Found"), ("503", ""), ("", "")] == [each.status for each in answers]
