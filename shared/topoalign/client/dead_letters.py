"""Puts messages that cannot be read on the dead-letter stream, with the reason."""

import msgspec
import structlog

from topoalign.client.fold import Counts
from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError, Unavailable
from topoalign.core.ports import Bus, Clock, Received, Stream

log = structlog.get_logger("topoalign.client")


class DeadLetters:
    """Those of one client."""

    def __init__(self, bus: Bus, clock: Clock, name: str, counts: Counts) -> None:
        """`name`: of the client; the letters carry it."""
        self._bus, self._clock, self._name, self._counts = bus, clock, name, counts

    async def put(self, stream: Stream, received: Received, error: TopoalignError) -> None:
        """Counts a message of this stream and publishes its letter once, if the bus is there."""
        self._counts.undecodable += 1
        log.warning("message put aside", stream=stream, position=received.position, finding=error.finding)
        letter = wire.dead_letter(self._name, received.message, error, self._clock.wall())
        name = f"deadletter.{wire.token(self._name)}.{stream}.{received.position}"
        try:
            await self._bus.publish(msgspec.structs.replace(letter, headers={**letter.headers, "Nats-Msg-Id": name}))
        except Unavailable as unavailable:
            log.warning("dead letter not stored", finding=unavailable.finding, remedy=unavailable.remedy)
