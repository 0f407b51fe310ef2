"""
The ports of the services: Protocols of the bus, the journal, the clock and the hardware.

Each port has one suite of contract tests, which every adapter passes: `MemoryBus` and the in-memory journal have the same
guarantees as those over NATS and disk. An adapter raises only the errors that are named here.
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
    """Port to the time. Durations are computed from `monotonic`; `wall` is only shown or recorded."""

    def wall(self) -> float:
        """The wall time in seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds since an unspecified moment, never decreasing."""

    async def sleep(self, seconds: float) -> None:
        """Returns after so many seconds of `monotonic`."""


class Stream(StrEnum):
    """The streams a subscriber can follow (design: events.md, Stores)."""

    ALLOCATIONS = "TOPOALIGN_ALLOCATIONS"
    RESERVATIONS = "TOPOALIGN_RESERVATIONS"
    NODES = "TOPOALIGN_NODES"
    DEADLETTERS = "TOPOALIGN_DEADLETTERS"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message on the bus. `wire` encodes and decodes its event."""

    subject: str
    headers: Mapping[str, str]
    body: bytes


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a stream with its position there."""

    message: Message
    position: int
    """Stream sequence, from 1. `Bus.follow(after=position)` continues after this message."""
    waiting: int = 0
    """Messages that waited behind this one when the bus sent it."""


Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers one request. The bus sends an error that it raises as the answer (`wire.encode_error`)."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A question that a service answers, one at a time. Several endpoints answer at the same time."""

    name: str
    """For people and statistics: `allocate`."""
    subject: str
    answer: Answer


MOST_IN_BATCH = 1_000
"""Messages of an atomic batch (nats-server 2.12 and later)."""


class Bus(Protocol):
    """Port to events and questions between processes, over NATS or in memory."""

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """
        Stores the message in its stream and returns its position. A repetition with the same `Nats-Msg-Id` is stored once.
        `expected_last`: the required position of the newest message of its subject, 0 for none; otherwise it raises
        BusConflict, unless the next message is a repetition of this one.

        Raises BusUnavailable if it is not known whether it was stored: publish the same message again. Raises BusRefused if
        the bus refused it, and IdTaken (a BusRefused) if the stream may have another message under the id: publish it under
        another id (`wire.with_message_mark`).
        """

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """
        Stores messages of one stream in this order, many in flight at once, and returns the position of each: None from the
        first one on that may not be stored, although later ones may be. Raises nothing.
        """

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """
        Stores all of these messages of one stream or none, and returns their positions. There are at most `MOST_IN_BATCH`,
        each of another subject, and each with its `expected_last`. Raises as `publish`; a repeated batch is stored once.
        """

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """The newest message that a stream has of a subject; None: there is none. Raises BusUnavailable, BusRefused."""

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """
        Yields the messages of a stream whose subject matches (`>` and `*` as in NATS), after this position, without end, in
        order, each at least once. It restores a lost connection and waits until a refusal ends. If the stream does not have
        the position (any more), it begins with the oldest message, so positions may decrease.
        """

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """Position of the newest message of matching subjects, 0 for none. Raises BusUnavailable, BusRefused."""

    async def forget(self, stream: Stream, subject: str) -> None:
        """Deletes the messages of matching subjects. Positions are not used again. Raises BusUnavailable, BusRefused."""

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """Asks the service at `subject`. Raises BusUnavailable without an answer `within` so many seconds."""

    def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AbstractAsyncContextManager[None]:
        """Answers questions while the context is open, as the service of this name."""

    @property
    def connected(self) -> bool:
        """Whether the bus seems reachable."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal: facts that were recorded together."""

    time: float
    """Wall time in seconds, for people."""
    events: tuple[LedgerEvent, ...]


class Journal(Protocol):
    """Port to the durable record of one node's allocations. One process has it at a time."""

    @property
    def unconfirmed(self) -> str | None:
        """Why allocations may be missing: an earlier journal was damaged. None: it is complete."""

    def load(self) -> list[JournalEntry]:
        """Returns all valid entries, oldest first, and sets a damaged journal aside. Raises StateFault."""

    def trust(self) -> None:
        """Confirms that the journal is complete. Raises StateFault; then it stays unconfirmed."""

    def append(self, entry: JournalEntry) -> None:
        """Adds an entry; it is on disk afterwards. If it raises StateFault, the entry is not in the journal."""

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replaces all entries by these, atomically. Raises StateFault."""

    def published(self) -> tuple[int, int] | None:
        """(epoch, seq) of the newest fact that the bus has; (0, 0) at first. May lag by one. None: not known."""

    def mark_published(self, epoch: int, seq: int) -> None:
        """Records that the bus has all facts up to this one. Never raises: without it they are published again."""


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
    """Port to the receiver of hardware events. Called in the event loop."""

    def receive(self, event: HardwareEvent) -> None:
        """Receives an event of a GPU."""

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        """Receives why no events arrive, and the GPUs whose health is unknown then. None: they arrive again."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and its health in one reading."""

    topology: Topology
    health: Mapping[DeviceID, DeviceHealth]
    """Of all GPUs and NICs."""
    findings: tuple[str, ...] = ()
    """Faults that the driver works around: a GPU that does not answer, links that differ from either end."""
    awaiting_reset: frozenset[DeviceID] = frozenset()
    """Devices that need a reset: lost, or the driver requests it. A device that is no longer here has had it."""
    nameless: bool = False
    """Whether a GPU does not report its id. It may be a missing one, which has had no reset then."""


class Driver(Protocol):
    """Port to the hardware of this node."""

    @property
    def source(self) -> str:
        """The value of `TopologyDiscovered.source`: `nvml`, `sysfs`, `described: dgx-a100`."""

    async def read(self) -> Inventory:
        """Reads everything again. Raises DriverFault; a single lost device is reported in the inventory instead."""

    async def watch(self, listener: Listener) -> None:
        """Reports events between readings, until cancelled. Returns at once if the driver has no events."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures the use of the GPUs, with processes without identity. Raises DriverFault."""
