"""Reads a store directly: the newest message of a subject, or the message at a position."""

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable, IdTaken, NobodyAnswers, clean
from topoalign.core.ports import Message, Received, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus.delivered import LINE, Delivered
from topoalign.runtime.nats_bus.nats_connection import NatsConnection

READ_SECONDS = 3.0
NO_MESSAGE = "404"
"""The status of the answer if no message matches."""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a store to a publication."""

    seq: int = 0
    duplicate: bool = False
    """True if the store already has a message with the same id, at this `seq`, and stored nothing."""
    error: event_stores.StoreRefusal | None = None


async def find_message(connection: NatsConnection, stream: Stream, wanted: dict[str, object]) -> Delivered | None:
    """
    The message for a query such as `{"seq": 17}` or `{"last_by_subj": "a.>"}`; None: no message matches. Raises
    BusUnavailable, BusRefused.
    """
    try:
        answer = await connection.request(source_of(stream), msgspec.json.encode(wanted), READ_SECONDS)
    except NobodyAnswers as error:
        raise nobody_reads(stream) from error
    if answer.is_of_a_store:
        return answer
    number, text = answer.status
    if number != NO_MESSAGE:
        raise BusUnavailable(f"reading {stream}: {number} {clean(text, 100)}")
    return None


def source_of(stream: Stream) -> str:
    """The subject on which a store is read. Any replica can answer (nats-server, ADR-31)."""
    return f"$JS.API.DIRECT.GET.{stream}"


def nobody_reads(stream: Stream) -> BusRefused:
    """The error for a store that does not exist, or that the account of this user does not have."""
    return BusRefused(
        f"store {stream} does not exist, or not for this user",
        "run `topoalign stores apply` as the administrator of NATS, and use the accounts of `topoalign nats-config`",
    )


async def purge(connection: NatsConnection, stream: Stream, subject: str) -> None:
    """Deletes the messages of matching subjects. Raises BusUnavailable, and BusRefused without permission."""
    wish = msgspec.json.encode({"filter": subject})
    error = msgspec.json.decode(
        await connection.api(f"$JS.API.STREAM.PURGE.{stream}", wish), type=event_stores.Info
    ).error
    if error is not None and error.err_code == event_stores.NO_JETSTREAM:  # this account is not that of the stores
        try:
            answer = await connection.request(f"{wire.PREFIX}.purge.{stream}", wish, READ_SECONDS)
            error = msgspec.json.decode(answer.body, type=event_stores.Info).error
        except NobodyAnswers:
            pass
    if error is not None and error.err_code != event_stores.NOT_FOUND:
        raise event_stores.store_error(f"deleting from store {stream}", error)


async def compare(connection: NatsConnection, stream: Stream, position: int, message: Message) -> None:
    """
    Raises IdTaken unless the stream has this message at this position, where its id was used before. A message that was
    deleted or cannot be read counts as another one, because a message should rather be stored twice than be lost.
    """
    name = message.headers["Nats-Msg-Id"]
    try:
        there = await find_message(connection, stream, {"seq": position})
    except BusRefused as error:
        raise IdTaken(name, f"message {position} of {stream} cannot be read: {error.finding}") from error
    if there is None:
        raise IdTaken(name, f"message {position} of {stream} cannot be read: no message found")
    stored = message_of(there)
    if stored is None or not wire.is_repetition(stored, message):
        raise IdTaken(name, f"message {position} of {stream} is another one")


def message_of(delivered: Delivered) -> Message | None:
    """The message as published. None: the name of a header is repeated, or a line is not a header."""
    there = delivered.in_store()
    message = delivered.received_at(there).message
    lines = delivered.head.count(LINE, 0, there.end) - 1  # the first line is of the protocol
    return message if len(message.headers) == lines else None


def received_of(delivered: Delivered | None) -> Received | None:
    """The message with its position. None: there is none, or it has headers that `message_of` does not take."""
    message = None if delivered is None else message_of(delivered)
    if delivered is None or message is None:
        return None
    return Received(message=message, position=delivered.in_store().position)
