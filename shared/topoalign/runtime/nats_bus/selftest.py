"""
Tests for each connection whether this client may publish its facts.

Each subject of facts is tested with a message for a stream that does not exist (header `Nats-Expected-Stream`): the store
that takes the subject refuses it. It is not stored; subscribers of the subject that do not use the stores receive it, with
the `ce-type` `topoalign.v1.SelfTest`.
"""

from collections.abc import Sequence

import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, NobodyAnswers
from topoalign.core.ports import Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus.nats_connection import NatsConnection
from topoalign.runtime.nats_bus.stored import Acknowledgement, find_message

TRY_SECONDS = 2.0
NO_STREAM = "TOPOALIGN_SELF_TEST"
EXPECTED_STREAM_DIFFERS = 10060
NOT_TAKEN = "run `topoalign stores apply` of this version, and use the accounts of `topoalign nats-config`"
HEADERS = {"ce-type": f"{wire.PREFIX}.SelfTest", "Nats-Expected-Stream": NO_STREAM}

log = structlog.get_logger("topoalign.runtime.nats")


class SelfTest:
    """Tests every new connection of a bus."""

    def __init__(self, publishes: Sequence[str]) -> None:
        """`publishes`: the subjects that this process publishes on."""
        self._publishes = tuple(publishes)
        self._logged: set[str] = set()

    async def run(self, connection: NatsConnection) -> None:
        """
        Raises BusRefused for the first subject without permission to publish, or if no store takes any subject, and
        BusUnavailable. If stores take only some subjects, each of the others is logged once.
        """
        if not self._publishes:
            await find_message(connection, Stream.NODES, {"seq": 1})
        lacking = [subject for subject in self._publishes if not await self.takes(connection, subject)]
        for subject in lacking:
            error = BusRefused(f"no store takes {subject} from this user", NOT_TAKEN)
            if len(lacking) == len(self._publishes):
                raise error
            if subject not in self._logged:
                self._logged.add(subject)
                log.warning(f"facts cannot be published on {subject}", finding=error.finding, remedy=error.remedy)

    async def takes(self, connection: NatsConnection, subject: str) -> bool:
        """Whether a store takes the subject. Raises BusRefused if its answer is not the expected refusal."""
        try:
            answer = await connection.request(subject, b"{}", TRY_SECONDS, HEADERS)
        except NobodyAnswers:
            return False
        refusal = msgspec.json.decode(answer.body, type=Acknowledgement).error
        if refusal is None or refusal.err_code != EXPECTED_STREAM_DIFFERS:
            raise event_stores.store_error(f"self-test on {subject}", refusal or event_stores.StoreRefusal(code=500))
        return True
