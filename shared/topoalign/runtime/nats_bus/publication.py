"""
Publishes one message, many in a row, or an atomic batch (nats-server 2.12, ADR-50), and reads the store's answer.

A store checks the expected last position before message ids. So for the repetition of a stored message it reports a
conflict (10071), and for the repetition of a stored batch a duplicate id (10201). In both cases, the first message of
the subject after the expected position shows whether the message was stored.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from secrets import token_hex

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import BusConflict, BusRefused, BusUnavailable, IdTaken, Unavailable, clean
from topoalign.core.ports import Message, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.nats_connection import NatsConnection
from topoalign.runtime.nats_bus.stored import Acknowledgement, compare, find_message, message_of

WRONG_LAST = 10071
WRONG_LAST_IN_BATCH = 10164
"""NATS' error codes if the newest message is not the expected one; the second for batches and replicated streams."""
DUPLICATE_IN_BATCH = 10201
INCOMPLETE_BATCH = 10176


async def publish_one(connection: NatsConnection, message: Message, expected: int | None, seconds: float) -> int:
    """As `Bus.publish`, on this connection. Raises NobodyAnswers if no store takes the subject."""
    stream = event_stores.store_of(message)
    headers = message.headers if expected is None else {**message.headers, wire.EXPECTED_LAST: str(expected)}
    acknowledgement = read_acknowledgement(
        (await connection.request(message.subject, message.body, seconds, headers)).body, message
    )
    if acknowledgement.error is not None:
        if expected is None or acknowledgement.error.err_code not in (WRONG_LAST, WRONG_LAST_IN_BATCH):
            raise event_stores.store_error(f"publishing on {clean(message.subject, 200)}", acknowledgement.error)
        position = await repeated_at(connection, stream, message, expected)
        if position is None:
            raise BusConflict(message.subject, expected)
        return position
    if acknowledgement.duplicate:
        await compare(connection, stream, acknowledgement.seq, message)
    return acknowledgement.seq


async def publish_many(connection: NatsConnection, messages: Sequence[Message], seconds: float) -> Sequence[int]:
    """Publishes messages. Returns their positions up to the first that may not have been stored (`Bus.publish_all`)."""
    positions: list[int] = []
    for message, answer in zip(messages, await publish_pipelined(connection, messages, seconds), strict=True):
        if answer is None or answer.error is not None:
            break
        if answer.duplicate:
            try:
                await compare(connection, event_stores.store_of(message), answer.seq, message)
            except Unavailable:  # includes IdTaken
                break
        positions.append(answer.seq)
    return positions


async def publish_atomic(
    connection: NatsConnection, batch: Sequence[tuple[Message, int]], seconds: float
) -> Sequence[int]:
    """As `Bus.publish_batch`, on this connection. Raises NobodyAnswers if no store takes the last subject."""
    stream = event_stores.store_of_batch([message for message, _ in batch])
    name = token_hex(16)
    (first, before), (last, _) = batch[0], batch[-1]
    conditional = [batch_message(message, expected, name, place) for place, (message, expected) in enumerate(batch, 1)]
    if not all(connection.fits(message.body, message.headers) for message in conditional):
        raise BusRefused(
            f"a message of a batch of {len(batch)} is more than the server's max_payload of {connection.client.max_payload}",
            "raise `max_payload` of nats-server to its default of 1 MiB, or publish less",
        )
    for message in conditional[:-1]:
        await connection.send(message.subject, message.body, headers=message.headers)
    commit = {**conditional[-1].headers, wire.BATCH_COMMIT: "1"}
    acknowledgement = read_acknowledgement(
        (await connection.request(last.subject, last.body, seconds, commit)).body, last
    )
    if acknowledgement.error is None:
        return range(acknowledgement.seq - len(batch) + 1, acknowledgement.seq + 1)
    if acknowledgement.error.err_code == INCOMPLETE_BATCH:
        raise BusUnavailable(f"a batch of {len(batch)} messages was lost on the way; nothing of it was stored")
    if acknowledgement.error.err_code not in (WRONG_LAST, WRONG_LAST_IN_BATCH, DUPLICATE_IN_BATCH):
        raise event_stores.store_error(f"a batch of {len(batch)} messages", acknowledgement.error)
    position = await repeated_at(connection, stream, first, before)
    if position is not None and await repeated_at(connection, stream, *batch[-1]) == position + len(batch) - 1:
        return range(position, position + len(batch))
    if acknowledgement.error.err_code == DUPLICATE_IN_BATCH:
        raise IdTaken(
            first.headers.get("Nats-Msg-Id", ""), "it, or another id of its batch, belongs to another message"
        )
    raise BusConflict(first.subject, before)


def batch_message(message: Message, expected: int, batch: str, place: int) -> Message:
    """The message with the headers of its place in a batch."""
    condition = {wire.EXPECTED_LAST: str(expected), wire.BATCH_ID: batch, wire.BATCH_SEQUENCE: str(place)}
    return msgspec.structs.replace(message, headers={**message.headers, **condition})


def read_acknowledgement(body: bytes, message: Message) -> Acknowledgement:
    """Decodes the store's answer. Raises BusUnavailable if it is not an acknowledgement."""
    try:
        return msgspec.json.decode(body, type=Acknowledgement)
    except msgspec.DecodeError as error:
        raise BusUnavailable(f"{clean(message.subject, 200)}: the answer is no acknowledgement") from error


async def repeated_at(connection: NatsConnection, stream: Stream, message: Message, expected: int) -> int | None:
    """The position of this message if it is the first of its subject after the expected position; otherwise None."""
    there = await find_message(connection, stream, {"seq": expected + 1, "next_by_subj": message.subject})
    if there is None:
        return None
    stored = message_of(there)
    return there.in_store().position if stored is not None and wire.is_repetition(stored, message) else None


async def publish_pipelined(
    connection: NatsConnection, messages: Sequence[Message], seconds: float
) -> Sequence[Acknowledgement | None]:
    """
    Publishes messages in order, without waiting for each acknowledgement. Returns the acknowledgement of each message,
    or None if none came within `seconds`. The first message that is too large for the server, and those after it, are
    not sent. Raises nothing: a message without an acknowledgement may or may not have been stored.
    """
    answers: list[asyncio.Future[Delivered]] = []
    sent = [*takewhile(lambda message: connection.fits(message.body, message.headers), messages)]
    if sent:
        subject = sent[0].subject
        try:
            with suppress(BusUnavailable, BusRefused), connection.waiting(subject, seconds):
                for message in sent:
                    answers.append(await connection.ask(message.subject, message.body, message.headers))
                await asyncio.wait(answers)
        finally:
            for answer in answers:
                answer.cancel()  # those without an answer
    found = [acknowledgement_in(answer) for answer in answers]
    return [*found, *[None] * (len(messages) - len(found))]


def acknowledgement_in(answer: asyncio.Future[Delivered]) -> Acknowledgement | None:
    """The acknowledgement. None: no answer came, or it cannot be decoded, for example if no store takes the subject."""
    with suppress(msgspec.DecodeError, asyncio.CancelledError):
        return msgspec.json.decode(answer.result().body, type=Acknowledgement)
    return None
