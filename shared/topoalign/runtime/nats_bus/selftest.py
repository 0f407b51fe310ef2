"""
The self-test of a connection: whether this client may publish its facts, and read them from the stores.

It has a subject of its own, `topoalign.v1.selftest.<name>`. A subject of facts is tested with a message that the server
only traces (headers `Nats-Trace-Only` and `Nats-Trace-Dest`, nats-server 2.11 and later). The server checks it like any
other, neither stores nor delivers it, and reports to the subject of the self-test. It refuses the message if its sender
may not publish on the subject of the report.

If the permission for that subject is missing, as in a configuration for an earlier version, a subject of facts is
tested with a message for a stream that does not exist. It is not stored either, but subscribers of the subject without
JetStream receive it.
"""

from collections.abc import Sequence

import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused
from topoalign.core.ports import Message, Stream
from topoalign.runtime import stores
from topoalign.runtime.nats_bus.connection import Connection
from topoalign.runtime.nats_bus.stored import Acknowledgement, found

TRY_SECONDS = 2.0
NO_STREAM = "TOPOALIGN_SELF_TEST"
EXPECTED_STREAM_DIFFERS = 10060
KIND = {"ce-type": f"{wire.PREFIX}.SelfTest"}

log = structlog.get_logger("topoalign.runtime.nats")


class SelfTest:
    """Tries every new connection of a bus; what is missing and can be done without is said once."""

    def __init__(self, name: str, speaks: Sequence[str]) -> None:
        """`speaks`: the subjects that this process publishes on. Without any, nothing is tried."""
        self.subject = f"{wire.PREFIX}.selftest.{name}"
        self._speaks = tuple(speaks)
        self._told: set[str] = set()

    async def run(self, connection: Connection, narrow: Sequence[stores.Narrow]) -> None:
        """
        Raises BusRefused that names the first subject on which we may not publish, and BusUnavailable. Subjects that the
        stores of an older version do not take are logged, and not tried.
        """
        if not self._speaks:
            return
        lacking = [(store, subject) for store in narrow for subject in self._speaks if store.lacks(subject)]
        for store, subject in lacking:
            self.tell(f"facts cannot be published on {subject}", store.error, store.error.remedy)
        missing = {subject for _, subject in lacking}
        traced = await self.may_use_own_subject(connection)
        for subject in [one for one in self._speaks if one not in missing]:
            await (self.trace(connection, subject) if traced else self.miss(connection, subject))
        streams = {stores.store_of(Message(subject=subject, headers={}, body=b"")) for subject in self._speaks}
        for stream in sorted(streams):
            await self.read(connection, stream)

    async def may_use_own_subject(self, connection: Connection) -> bool:
        """Whether this client may publish on the subject of its self-test; if not, logs it once."""
        try:
            await self.publish(connection, self.subject, KIND)
        except BusRefused as error:
            self.tell("self-test on the subjects of facts", error, f"grant this user to publish on {self.subject}")
            return False
        return True

    async def trace(self, connection: Connection, subject: str) -> None:
        """Test a subject of facts with a message that the server traces and does not store."""
        headers = {"Nats-Trace-Only": "true", "Nats-Trace-Dest": self.subject}
        await self.publish(connection, subject, KIND | headers)

    async def miss(self, connection: Connection, subject: str) -> None:
        """Publishes for a stream that does not exist."""
        headers = KIND | {"Nats-Expected-Stream": NO_STREAM}
        said = msgspec.json.decode(await connection.request(subject, b"{}", TRY_SECONDS, headers), type=Acknowledgement)
        if said.error is None or said.error.err_code != EXPECTED_STREAM_DIFFERS:
            raise stores.refused(f"self-test on {subject}", said.error or stores.Refusal(code=500))

    async def publish(self, connection: Connection, subject: str, headers: dict[str, str]) -> None:
        """Raises BusRefused if we may not: the server says so before it answers whatever is asked afterwards."""
        with connection.waiting(subject, TRY_SECONDS):
            await connection.send(subject, b"{}", headers=headers)
            await connection.api(f"$JS.API.STREAM.INFO.{stores.NODES.name}", b"")

    async def read(self, connection: Connection, stream: Stream) -> None:
        """Test whether stored messages can be read; if not, log the missing permission once."""
        try:
            await found(connection, stream, {"seq": 1})
        except BusRefused as error:
            remedy = f"grant this user to publish on $JS.API.STREAM.MSG.GET.{stream}"
            self.tell("repeated ids cannot be compared with what is stored: such facts are stored twice", error, remedy)

    def tell(self, event: str, error: BusRefused, remedy: str) -> None:
        """Log a missing permission once for the life of the process."""
        if event not in self._told:
            self._told.add(event)
            log.warning(event, finding=error.finding, remedy=remedy)
