"""What a follower reads of a message that a consumer delivers."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

from topoalign.core.model.errors import BusUnavailable
from topoalign.runtime.nats_bus.delivered import Delivered, Headers

NAME = st.text("abcXYZ-09", min_size=1, max_size=12)
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
LINE = st.one_of(
    st.tuples(NAME, VALUE).map(lambda pair: f"{pair[0]}: {pair[1]}".encode()),
    st.binary(max_size=20).filter(lambda line: b"\r" not in line and b"\n" not in line),
)


def head(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def delivered(reply: str, first: bytes = b"") -> Delivered:
    return Delivered(b"topoalign.v1.x", reply.encode(), b"{}", first)


@given(st.lists(LINE, max_size=8))
@example([b":"])
@example([b"a\x1cb:"])
def test_headers_are_those_that_the_library_reads(lines: list[bytes]) -> None:
    raw = head(*lines)

    assert Client._parse_header_lines(raw.removeprefix(b"NATS/1.0\r\n")) == dict(Headers(raw))


@given(st.dictionaries(NAME, VALUE, max_size=8))
def test_one_header_is_found_as_among_all(pairs: dict[str, str]) -> None:
    raw = head(*(f"{name}: {value}".encode() for name, value in pairs.items()))

    assert {name: value.encode().strip().decode() for name, value in pairs.items()} == {
        name: Headers(raw)[name] for name in pairs
    }
    assert Headers(raw) == {name: Headers(raw)[name] for name in pairs}


@pytest.mark.parametrize(
    "line", [b"Nats-Msg-Id:17", b"Nats-Msg-Id : 17", b"Nats-Msg-Id:\t17", b"Nats-Msg-Id: 4\r\nNats-Msg-Id: 17"]
)
def test_a_header_in_another_form_is_found_too(line: bytes) -> None:
    assert "17" == Headers(head(b"X-Nats-Msg-Id: 3", line))["Nats-Msg-Id"]


def test_a_name_within_another_or_within_a_value_is_not_that_header() -> None:
    headers = Headers(head(b"X-ce-id: 3", b"note: ce-id: 4"))

    assert ("", "") == (headers.get("ce-id", ""), Headers(b"").get("ce-id", ""))


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.S.follow-1.1.41.7.1763715600000000000.12",
        "$JS.ACK._.ACCOUNT.S.follow-1.1.41.7.1763715600000000000.12",
        "$JS.ACK.hub.ACCOUNT.S.follow-1.1.41.7.1763715600000000000.12.x7Fq",
    ],
)
def test_position_count_and_what_waits_are_in_the_reply(reply: str) -> None:
    """In both forms that servers use, with and without a domain."""
    count, received = delivered(reply, head(b"ce-id: a")).counted()

    assert (7, 41, 12, "a") == (count, received.position, received.waiting, received.message.headers["ce-id"])


@pytest.mark.parametrize("reply", ["$JS.ACK.S", "$JS.ACK.S.f.1.x.7.0.12", "$JS.ACK."])
def test_a_message_that_no_consumer_delivered_has_it_fetched_again(reply: str) -> None:
    with pytest.raises(BusUnavailable, match="no consumer"):
        delivered(reply).counted()


def test_a_remark_of_the_server_has_a_number_and_a_text() -> None:
    remarks = [
        delivered("", b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n"),
        delivered("", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"),
        delivered("", b"NATS/1.0 503\r\n\r\n"),
        delivered("reply", b""),
    ]

    assert all(each.is_remark for each in remarks)
    assert [("408", "Request Timeout"), ("100", "Idle Heartbeat"), ("503", ""), ("", "")] == [
        each.status for each in remarks
    ]
