"""
The self-test of a connection: whether this client may publish its facts, and read them from the stores.

Each subject of facts is tested with a message for a stream that does not exist (header `Nats-Expected-Stream`): the store
that takes the subject refuses it. It is not stored; subscribers of the subject that do not use the stores receive it, with
the `ce-type` `topoalign.v1.SelfTest`.
"""

from collections.abc import Sequence

import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, NobodyAnswers
from topoalign.core.ports import Message, Stream
from topoalign.runtime import stores
from topoalign.runtime.nats_bus.connection import Connection
from topoalign.runtime.nats_bus.stored import Acknowledgement, found

TRY_SECONDS = 2.0
NO_STREAM = "TOPOALIGN_SELF_TEST"
EXPECTED_STREAM_DIFFERS = 10060
HEADERS = {"ce-type": f"{wire.PREFIX}.SelfTest", "Nats-Expected-Stream": NO_STREAM}

log = structlog.get_logger("topoalign.runtime.nats")


class SelfTest:
    """Tries every new connection of a bus; what is missing and can be done without is logged once."""

    def __init__(self, speaks: Sequence[str]) -> None:
        """`speaks`: the subjects that this process publishes on. Without any, nothing is tried."""
        self._speaks = tuple(speaks)
        self._logged: set[str] = set()

    async def run(self, connection: Connection, narrow: Sequence[stores.Narrow]) -> None:
        """
        Raises BusRefused that names the first subject on which we may not publish, and BusUnavailable. Subjects that the
        stores of an older version do not take are logged, and not tried.
        """
        lacking = [(store, subject) for store in narrow for subject in self._speaks if store.lacks(subject)]
        for store, subject in lacking:
            self.log_once(f"facts cannot be published on {subject}", store.error, store.error.remedy)
        missing = {subject for _, subject in lacking}
        for subject in self._speaks:
            if subject not in missing:
                await self.publish(connection, subject)
        streams = {stores.store_of(Message(subject=subject, headers={}, body=b"")) for subject in self._speaks}
        for stream in sorted(streams):
            await self.read(connection, stream)

    async def publish(self, connection: Connection, subject: str) -> None:
        """Publishes for a stream that does not exist. Raises BusRefused if the store does not refuse just that."""
        try:
            answer = await connection.request(subject, b"{}", TRY_SECONDS, HEADERS)
        except NobodyAnswers as error:
            raise BusRefused(
                f"no store takes {subject} from this user", "grant this user to publish on it (`topoalign nats-config`)"
            ) from error
        refusal = msgspec.json.decode(answer, type=Acknowledgement).error
        if refusal is None or refusal.err_code != EXPECTED_STREAM_DIFFERS:
            raise stores.refused(f"self-test on {subject}", refusal or stores.Refusal(code=500))

    async def read(self, connection: Connection, stream: Stream) -> None:
        """Tests whether stored messages can be read; if not, logs the missing permission once."""
        try:
            await found(connection, stream, {"seq": 1})
        except BusRefused as error:
            remedy = f"grant this user to publish on $JS.API.STREAM.MSG.GET.{stream}"
            self.log_once(
                "repeated ids cannot be compared with what is stored: such facts are stored twice", error, remedy
            )

    def log_once(self, event: str, error: BusRefused, remedy: str) -> None:
        """Logs a missing permission once for the life of the process."""
        if event not in self._logged:
            self._logged.add(event)
            log.warning(event, finding=error.finding, remedy=remedy)
