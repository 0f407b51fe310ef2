"""
Publishes many messages on one connection before the first is acknowledged.

They are written to the connection in their order, and a store takes what one connection brings in that order. Each has a
reply subject of its own, so that it does not matter in which order the acknowledgements come, or which of them are lost.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

import anyio
import msgspec
from nats.aio.msg import Msg

from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.ports import Message
from topoalign.runtime.nats_bus.connection import Connection
from topoalign.runtime.nats_bus.stored import Acknowledgement


class Acknowledgements:
    """What the stores answer to some messages that are under way."""

    def __init__(self, count: int) -> None:
        self.heard: list[Acknowledgement | None] = [None] * count
        """None: nothing yet, or nothing that can be read, as where no store takes the subject."""
        self._left = count
        self.complete = anyio.Event()

    async def hear(self, message: Msg) -> None:
        """Takes the answer to the message whose number is the last token of the subject."""
        number = int(message.subject.rpartition(".")[2])
        with suppress(msgspec.DecodeError):
            self.heard[number] = msgspec.json.decode(message.data, type=Acknowledgement)
        self._left -= 1
        if not self._left:
            self.complete.set()


async def publish_pipelined(
    connection: Connection, messages: Sequence[Message], seconds: float
) -> Sequence[Acknowledgement | None]:
    """
    Publishes messages in their order, and returns what came in answer to each within so many seconds, the sending
    included. The first that is too large for the server and those behind it are not sent. Raises nothing: a message
    without an acknowledgement may be stored or not.
    """
    sent = list(takewhile(lambda message: connection.fits(message.body, message.headers), messages))
    return [*await acknowledgements_of(connection, sent, seconds), *[None] * (len(messages) - len(sent))]


async def acknowledgements_of(
    connection: Connection, messages: Sequence[Message], seconds: float
) -> Sequence[Acknowledgement | None]:
    """As `publish_pipelined`, of messages that fit."""
    answers = Acknowledgements(len(messages))
    if not messages:
        return answers.heard
    inbox = connection.client.new_inbox()
    try:
        subscription = await connection.subscribe(f"{inbox}.*", answers.hear)
    except (BusUnavailable, BusRefused):
        return answers.heard
    try:
        with suppress(BusUnavailable, BusRefused), connection.waiting(inbox, seconds), connection.translated(inbox):
            for number, message in enumerate(messages):
                await connection.client.publish(
                    message.subject, message.body, reply=f"{inbox}.{number}", headers=dict(message.headers)
                )
            await answers.complete.wait()
    finally:
        await connection.unsubscribe(subscription)
    return answers.heard
