"""Reads a store with the JetStream API: the newest message of a subject, or the message at a position."""

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, IdTaken, clean
from topoalign.core.ports import Message, Received, Stream
from topoalign.runtime import stores
from topoalign.runtime.nats_bus.connection import Connection

NO_MESSAGE = 10037


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a store answers to a publication."""

    seq: int = 0
    duplicate: bool = False
    """It stored nothing, because a message of the same id is there already, at this `seq`."""
    error: stores.Refusal | None = None


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the API shows it; bytes are base64."""

    subject: str = ""
    seq: int = 0
    hdrs: bytes = b""
    data: bytes = b""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The API's answer about one message."""

    message: Stored = Stored()
    error: stores.Refusal | None = None


async def found(connection: Connection, stream: Stream, wanted: dict[str, object]) -> Found:
    """
    The message that is wanted: `{"seq": 17}`, or `{"last_by_subj": "a.>"}`.

    Raises BusUnavailable, and BusRefused where it may not be asked; other errors of the store are part of the answer.
    """
    answer = await connection.api(f"$JS.API.STREAM.MSG.GET.{stream}", msgspec.json.encode(wanted))
    return msgspec.json.decode(answer, type=Found)


async def purge(connection: Connection, stream: Stream, subject: str) -> None:
    """Deletes the messages of matching subjects. Raises BusUnavailable, and BusRefused where it may not be done."""
    answer = await connection.api(f"$JS.API.STREAM.PURGE.{stream}", msgspec.json.encode({"filter": subject}))
    error = msgspec.json.decode(answer, type=Found).error
    if error is not None and error.err_code != stores.NOT_FOUND:
        raise stores.refused(f"deleting from store {stream}", error)


async def compare(connection: Connection, stream: Stream, position: int, message: Message) -> None:
    """
    Raises IdTaken unless the stream has this message at this position, where it says that the id was used before.

    A message that is gone or that we may not read counts as another one: stored twice is borne, not at all is not.
    """
    name = message.headers["Nats-Msg-Id"]
    try:
        there = await found(connection, stream, {"seq": position})
    except BusRefused as error:
        raise IdTaken(name, f"message {position} of {stream} cannot be read: {error.finding}") from error
    if there.error is not None:
        description = clean(there.error.description, 200)
        raise IdTaken(name, f"message {position} of {stream} cannot be read: {description}")
    stored = message_of(there.message)
    if stored is None or not wire.is_repetition(stored, message):
        raise IdTaken(name, f"message {position} of {stream} is another one")


def message_of(stored: Stored) -> Message | None:
    """The message as it was published. None: its headers are not lines of a name and a value, or have a name twice."""
    try:
        lines = stored.hdrs.decode().split("\r\n")
    except UnicodeDecodeError:
        return None
    pairs = [line.split(":", 1) for line in lines[1:] if line]
    if any(len(pair) != 2 for pair in pairs):
        return None
    headers = {name: value.strip() for name, value in pairs}
    return Message(subject=stored.subject, headers=headers, body=stored.data) if len(headers) == len(pairs) else None


def received_of(stored: Stored) -> Received | None:
    """The message with its position. None: there is none, or it has headers that `message_of` does not take."""
    message = message_of(stored) if stored.seq else None
    return None if message is None else Received(message=message, position=stored.seq)
