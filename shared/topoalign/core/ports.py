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

if TYPE_CHECKING:  # at start, no service measures
    from topoalign.core.model.processes import DeviceUse


class Clock(Protocol):
    """Port to the clock. Durations are computed from `monotonic`; `wall` is only shown or recorded."""

    def wall(self) -> float:
        """The wall time in seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds since an unspecified moment, never decreasing."""

    async def sleep(self, seconds: float) -> None:
        """Returns after this number of seconds of `monotonic`; without a wait if the number is negative."""


class Stream(StrEnum):
    """The streams that a subscriber can follow (docs/events.md, Stores)."""

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
    """Number of messages that were waiting after this one when the bus sent it."""


Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers one request. If it raises an error, the bus sends the error as the answer (`wire.encode_error`)."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request that a service answers, one request at a time. Several endpoints answer concurrently."""

    name: str
    """For display and statistics: `allocate`."""
    subject: str
    answer: Answer


MOST_IN_BATCH = 1_000
"""Maximum number of messages in an atomic batch (nats-server 2.12 and later)."""


class Bus(Protocol):
    """Port to events and requests between processes, over NATS or in memory."""

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """
        Stores the message in its stream and returns its position. A message with the same `Nats-Msg-Id` is not stored
        again. `expected_last`: the required position of the newest message of its subject, 0 for no message. Raises
        BusConflict if it differs, unless the next message of the subject is a repetition of this one.

        Raises BusUnavailable if it is unknown whether the message was stored: publish the same message again. Raises
        BusRefused if the bus refused the message, and IdTaken (a BusRefused) if the stream might have another message
        with the id: publish it with another id (`wire.with_message_mark`).
        """

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """
        Stores messages of one stream in this order, many in flight at once. Returns the position of each message. If a
        message might not be stored, the result has None for it and for all later messages, although these might be
        stored. Never raises an error.
        """

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """
        Stores all of these messages of one stream or none, and returns their positions. A batch has at most
        `MOST_IN_BATCH` messages with different subjects, each with its `expected_last`. Raises the same errors as
        `publish`. A repeated batch is stored once.
        """

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """The newest message of a subject in a stream. None: there is none. Raises BusUnavailable and BusRefused."""

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """
        Yields the messages of a stream after this position whose subject matches (`>` and `*` as in NATS). It yields
        without end, in order, and each message at least once. It restores a lost connection. If the bus refuses the
        subscription, it retries until the bus accepts it. If the stream no longer has the position, it begins with the
        oldest message, so positions can decrease.
        """

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """Position of the newest message of matching subjects, 0 for none. Raises BusUnavailable and BusRefused."""

    async def forget(self, stream: Stream, subject: str) -> None:
        """Deletes the messages of matching subjects. Positions are not reused. Raises BusUnavailable and BusRefused."""

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """Sends a request to `subject`. Raises BusUnavailable if no answer arrives `within` these seconds."""

    def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AbstractAsyncContextManager[None]:
        """Answers requests as the service of this name while the context is open."""

    @property
    def connected(self) -> bool:
        """Whether the bus appears to be reachable."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal: facts that were recorded together."""

    time: float
    """Wall time in seconds, only shown."""
    events: tuple[LedgerEvent, ...]


class Journal(Protocol):
    """Port to the durable record of one node's allocations. Only one process can have it open at a time."""

    @property
    def unconfirmed(self) -> str | None:
        """Why allocations might be missing: an earlier journal was damaged. None: it is complete."""

    def load(self) -> list[JournalEntry]:
        """Returns all valid entries, oldest first, and sets a damaged journal aside. Raises StateFault."""

    def trust(self) -> None:
        """Confirms that the journal is complete. If it raises StateFault, the journal stays unconfirmed."""

    def append(self, entry: JournalEntry) -> None:
        """Adds an entry; it is on disk afterwards. If it raises StateFault, the entry is not in the journal."""

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replaces all entries by these, atomically. Raises StateFault."""

    def published(self) -> tuple[int, int] | None:
        """(epoch, seq) of the newest fact that the bus has; (0, 0) at first. Can be one fact behind. None: unknown."""

    def mark_published(self, epoch: int, seq: int) -> None:
        """Records that the bus has all facts up to this one. Never raises: if it fails, they are published again."""


class Occurrence(StrEnum):
    """The kinds of events that a driver can report for a GPU between two readings."""

    XID = "xid"
    """An error with an XID number from the driver."""
    DOUBLE_BIT_ECC = "double-bit-ecc"
    SINGLE_BIT_ECC = "single-bit-ecc"
    """Corrected by the hardware; workloads are not affected."""
    UNAVAILABLE = "unavailable"
    """The driver has taken the GPU out of service."""
    CHANGED = "changed"
    """The MIG instances of the GPU or its recovery action changed. The next reading has the details."""


class HardwareEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a GPU that a driver reports between two readings."""

    kind: Occurrence
    gpu: DeviceID | None
    """None: a GPU whose id is unknown."""
    xid: int | None = None
    gpu_instance: int | None = None
    """The MIG instance with the event. None: the whole GPU."""
    compute_instance: int | None = None


class Listener(Protocol):
    """Port to the receiver of hardware events. Called in the event loop."""

    def receive(self, event: HardwareEvent) -> None:
        """Receives an event of a GPU."""

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        """Receives why no events arrive (None: they arrive again), and the GPUs whose health is unknown until then."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and its health in one reading."""

    topology: Topology
    health: Mapping[DeviceID, DeviceHealth]
    """The health of all GPUs and NICs."""
    findings: tuple[str, ...] = ()
    """Faults that the driver works around: a GPU that does not answer, or a link whose ends report different data."""
    awaiting_reset: frozenset[DeviceID] = frozenset()
    """Devices that need a reset: lost, or the driver requests it. One that leaves this set, or returns, was reset."""
    nameless: bool = False
    """Whether a GPU does not report its id. Then it might be a missing GPU, whose absence is no reset."""


class Driver(Protocol):
    """Port to the hardware of this node."""

    @property
    def source(self) -> str:
        """The value of `TopologyDiscovered.source`: `nvml`, `sysfs`, `described: dgx-a100`."""

    async def read(self) -> Inventory:
        """Reads the hardware again. Raises DriverFault. A single lost device is reported in the inventory instead."""

    async def watch(self, listener: Listener) -> None:
        """Reports events between readings, until cancelled. Returns at once if the driver has no events."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures the use of the GPUs. The pods of the processes are unknown at this stage. Raises DriverFault."""
