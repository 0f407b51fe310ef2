"""Puts messages that cannot be read on the dead-letter stream, with the reason."""

from urllib.parse import quote

import msgspec
import structlog

from topoalign.client.fold import Counts
from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError, Unavailable, clean
from topoalign.core.ports import Bus, Clock, Message, Received, Stream

LONGEST_HEADER = 300
"""Characters of one header that a dead letter keeps: it must fit where the message itself has."""

KNOWN_HEADERS = (
    "ce-id",
    "ce-type",
    "ce-source",
    "ce-time",
    "ce-specversion",
    "ce-datacontenttype",
    "traceparent",
)
"""What a dead letter keeps of the headers it was found with: those that events have."""

log = structlog.get_logger("topoalign.client")


class DeadLetters:
    """Those of one client."""

    def __init__(self, bus: Bus, clock: Clock, name: str, counts: Counts) -> None:
        """`name`: of the client; the letters carry it."""
        self._bus = bus
        self._clock = clock
        self._name = name
        self._counts = counts

    async def put(self, stream: Stream, received: Received, error: TopoalignError) -> None:
        """Counts a message of this stream and publishes its letter once, if the bus is there."""
        self._counts.undecodable += 1
        log.warning("message put aside", stream=stream, position=received.position, finding=error.finding)
        letter = dead_letter(self._name, received.message, error, self._clock.wall())
        name = f"deadletter.{wire.token(self._name)}.{stream}.{received.position}"
        try:
            await self._bus.publish(msgspec.structs.replace(letter, headers={**letter.headers, "Nats-Msg-Id": name}))
        except Unavailable as unavailable:
            log.warning("dead letter not stored", finding=unavailable.finding, remedy=unavailable.remedy)


def dead_letter(service: str, message: Message, error: TopoalignError, time: float) -> Message:
    """Makes the report of a consumer on a message that it could not decode or apply: the message, and the reason."""
    headers = {
        key: quote(message.headers[key][:LONGEST_HEADER], safe=f"{wire.PLAIN}%", errors="replace")  # escaped already
        for key in KNOWN_HEADERS
        if key in message.headers
    }
    return Message(
        subject=f"{wire.PREFIX}.deadletter.{wire.token(service)}",
        headers={
            **headers,
            "topoalign-subject": quote(message.subject),
            "topoalign-reason": quote(clean(str(error), 300)),
            "topoalign-time": str(int(time)),
        },
        body=message.body[: wire.LARGEST_BODY],
    )
