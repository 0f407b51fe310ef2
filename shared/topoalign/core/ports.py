"""
The ports of the services: Protocols for what they need from outside, such as a bus, a journal and the hardware.

Each port has one suite of contract tests, and every adapter passes it: `MemoryBus` and the in-memory journal have the
same guarantees as those over NATS and disk. Errors that may cross a port are named here; everything else is a defect of the
adapter.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from topoalign.core.model.events import DeviceHealth, LedgerEvent
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology

if TYPE_CHECKING:  # nobody measures at the start
    from topoalign.core.model.processes import DeviceUse


class Clock(Protocol):
    """Port to the time. Durations come from `monotonic`; `wall` is only ever shown or recorded, never subtracted."""

    def wall(self) -> float:
        """The wall time in seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds since an unspecified moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Returns after so many seconds of `monotonic`; cancellable."""


class Stream(StrEnum):
    """The streams a subscriber can follow (design: events.md, Stores)."""

    ALLOCATIONS = "TOPOALIGN_ALLOCATIONS"
    RESERVATIONS = "TOPOALIGN_RESERVATIONS"
    NODES = "TOPOALIGN_NODES"
    DEADLETTERS = "TOPOALIGN_DEADLETTERS"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message on the bus: `wire` encodes an event as one and decodes it again."""

    subject: str
    headers: Mapping[str, str]
    body: bytes


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a stream with its position there."""

    message: Message
    position: int
    """Stream sequence, from 1. To go on after this one, follow the stream `after=position`."""
    waiting: int = 0
    """Messages that waited behind this one when the bus sent it."""


Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers one request. What it raises the bus makes an answer, too (`wire.encode_error`)."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A question that a service answers, one at a time; endpoints do not wait for one another."""

    name: str
    """For people and statistics: `allocate`."""
    subject: str
    answer: Answer


MOST_IN_BATCH = 1_000
"""Messages of an atomic batch (nats-server 2.12 and later)."""


class Bus(Protocol):
    """Port to events and questions between processes. NATS is one adapter, memory the other."""

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """
        Stores the message in its stream and returns its position; a repetition of its `Nats-Msg-Id` is stored once.
        `expected_last`: only if the newest message of its subject has this position, 0 for none; else BusConflict, unless
        the first one after it is this message, which is then a repetition.

        Raises BusUnavailable when it is not known whether it was stored: publish the same message again. Raises
        BusRefused when the bus refused it. Raises IdTaken, which is a BusRefused, when the stream has another message
        under the id, or when the two cannot be compared: publish it under another id (`wire.with_message_mark`).
        """

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """
        Stores messages of one stream in this order, many of them in flight at once, and returns the position of each: None
        from the first one on that may not be stored; what follows it may be stored all the same. Raises nothing.
        """

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """
        Stores messages of one stream, at most `MOST_IN_BATCH` and each of another subject, all of them or none, and returns
        their positions. The number with each is the position expected as that of its subject's newest message.

        Raises BusConflict, with nothing stored, if one of them is not, unless the batch is a repetition of one that was
        stored. Raises BusUnavailable and BusRefused as `publish` does.
        """

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """The newest message that a stream keeps of a subject, None for none. Raises BusUnavailable, BusRefused."""

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """
        Follows the messages of a stream whose subject matches (`>` and `*` as in NATS), after this position, without end.

        They come in order, each at least once, and each is fetched when the loop asks for it. A lost connection is restored
        inside, and a refusal is waited out. A position before the oldest message kept, or after the newest one because the
        stream was lost or rolled back, begins with the oldest; positions then go back, also while it is followed.
        """

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """Position of the newest message kept of matching subjects, 0 for none. Raises BusUnavailable, BusRefused."""

    async def forget(self, stream: Stream, subject: str) -> None:
        """Deletes what a stream keeps of matching subjects. Positions go on. Raises BusUnavailable, BusRefused."""

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """Asks the service at `subject` for an answer within so many seconds. Raises BusUnavailable if none comes."""

    def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AbstractAsyncContextManager[None]:
        """Answers questions while the context is open, as the service of this name."""

    @property
    def connected(self) -> bool:
        """Whether the bus can be reached, as far as is known."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal: facts that became true together."""

    time: float
    """Wall time in seconds, for people."""
    events: tuple[LedgerEvent, ...]


class Journal(Protocol):
    """Port to the record of one node's allocations, which survives this process. One process has it at a time."""

    @property
    def unconfirmed(self) -> str | None:
        """Why the journal may not hold all that was given: an earlier one was damaged. None: it holds all."""

    def load(self) -> list[JournalEntry]:
        """Returns all entries that can be trusted, oldest first; sets aside what is damaged. Raises StateFault."""

    def trust(self) -> None:
        """Confirms that the journal is complete. Raises StateFault; then it stays unconfirmed."""

    def append(self, entry: JournalEntry) -> None:
        """Adds an entry; when this returns it is on disk. Raises StateFault, and then the entry is not in the journal."""

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replaces all entries by these, at once or not at all. Raises StateFault."""

    def published(self) -> tuple[int, int] | None:
        """Returns (epoch, seq) up to which the bus has the facts; (0, 0) at first. May lag by one. None: not known."""

    def mark_published(self, epoch: int, seq: int) -> None:
        """Records up to where the bus has the facts. Never raises: after a loss they are published again, same ids."""


class Occurrence(StrEnum):
    """The kinds of events that a driver may report of a GPU between two readings."""

    XID = "xid"
    """An error that the driver gives a number."""
    DOUBLE_BIT_ECC = "double-bit-ecc"
    SINGLE_BIT_ECC = "single-bit-ecc"
    """Corrected by the hardware; no work is harmed."""
    UNAVAILABLE = "unavailable"
    """The driver has taken it out of use."""
    CHANGED = "changed"
    """Its MIG instances, or what it needs to recover; the next reading has the details."""


class HardwareEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a GPU that a driver reports between two readings."""

    kind: Occurrence
    gpu: DeviceID | None
    """None: a GPU that does not report its id."""
    xid: int | None = None
    gpu_instance: int | None = None
    """Of the MIG instance it happened to; None: to the whole GPU."""
    compute_instance: int | None = None


class Listener(Protocol):
    """Port to the receiver of hardware events between two readings. Called in the event loop."""

    def receive(self, event: HardwareEvent) -> None:
        """Takes in an event of a GPU."""

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        """Takes in why no events arrive, and of which GPUs the health is therefore unknown. None: they arrive again."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and its health as a driver found it in one reading."""

    topology: Topology
    health: Mapping[DeviceID, DeviceHealth]
    """Of all GPUs and NICs."""
    findings: tuple[str, ...] = ()
    """Faults that the driver works around: a GPU that does not answer, links that differ from either end."""
    awaiting_reset: frozenset[DeviceID] = frozenset()
    """Devices that work again only after a reset: lost, or the driver asks for one. One that is no longer here had it."""
    nameless: bool = False
    """A GPU does not report its id, so one that is missing may be this one, and had no reset."""


class Driver(Protocol):
    """Port to the hardware of this node."""

    @property
    def source(self) -> str:
        """The value of `TopologyDiscovered.source`: `nvml`, `sysfs`, `described: dgx-a100`."""

    async def read(self) -> Inventory:
        """Reads everything anew. Raises DriverFault; a single lost device is reported in the inventory instead."""

    async def watch(self, listener: Listener) -> None:
        """Reports what happens between readings, until cancelled; returns at once where nothing is ever reported."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures what the GPUs are used for, processes without identity. Raises DriverFault if it cannot measure."""
