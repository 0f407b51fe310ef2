"""
What the services need from outside, as duties rather than as libraries.

Each port has one suite of contract tests, and every adapter passes it: `MemoryBus` and the in-memory journal are as real as
those over NATS and disk. Errors that may cross a port are named here; everything else is a defect of the adapter.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

import msgspec

from topoalign.core.model.events import DeviceHealth, LedgerEvent
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology


class Clock(Protocol):
    """Time. Durations come from `monotonic`; `wall` is only ever shown or recorded, never subtracted."""

    def wall(self) -> float:
        """Seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds since some moment, never going back."""

    async def sleep(self, seconds: float) -> None: ...


class Stream(StrEnum):
    """The streams a subscriber can follow (design: events.md, Stores)."""

    ALLOCATIONS = "TOPOALIGN_ALLOCATIONS"
    NODES = "TOPOALIGN_NODES"
    DEADLETTERS = "TOPOALIGN_DEADLETTERS"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What travels: `wire` makes it of an event and an event of it."""

    subject: str
    headers: dict[str, str]
    body: bytes


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message and its place in its stream."""

    message: Message
    position: int
    """Stream sequence, from 1. To go on after this one, follow the stream `after=position`."""
    waiting: int = 0
    """Messages that waited behind this one when the bus sent it."""


Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers one request. It never raises: failures are answers too (`wire.failure`)."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a service can be asked. It answers one question at a time; endpoints do not wait for one another."""

    name: str
    """For people and statistics: `allocate`."""
    subject: str
    answer: Answer


class Bus(Protocol):
    """Events and questions between processes. NATS is one adapter, memory the other."""

    async def publish(self, message: Message) -> int:
        """
        Stores the message in its stream and returns its position; a repetition of its `Nats-Msg-Id` is stored once.

        Raises BusUnavailable when it is not known whether it was stored: publish the same message again. Raises
        BusRefused when the bus said no. Raises IdTaken, which is a BusRefused, when the stream has another message under the
        id, or when the two cannot be compared: publish it under another id (`wire.renamed`).
        """

    def follow(
        self, stream: Stream, subject: str, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[Received]]:
        """
        The stream's messages whose subject matches (`>` and `*` as in NATS), from those after this position to for ever.

        In order, each at least once, in step with the reader: the next is fetched when the loop asks for it. A broken
        connection is mended inside, and a refusal is waited out; a position before the oldest message kept begins with the
        oldest, and so does one after the newest, because the stream has then been lost or rolled back. The positions of a
        stream that was lost or rolled back while it is followed go back likewise.
        """

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """
        Of the newest message that a stream keeps of matching subjects, 0 if there is none.

        Raises BusUnavailable, and BusRefused where it may not be asked.
        """

    async def forget(self, stream: Stream, subject: str) -> None:
        """
        Deletes what a stream keeps of matching subjects: what a node said that is gone for good. Positions go on.

        Raises BusUnavailable, and BusRefused where it may not be done.
        """

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """Asks whoever answers there, for at most `within` seconds. Raises BusUnavailable if nobody does, or not in time."""

    def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AbstractAsyncContextManager[None]:
        """Answers questions while the context is open, as the service of this name (NATS micro: `nats micro ls`)."""

    @property
    def connected(self) -> bool:
        """Whether the bus can be reached, as far as is known."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal: facts that became true together."""

    time: float
    """Wall time in seconds, for people."""
    events: tuple[LedgerEvent, ...]


class Journal(Protocol):
    """The record of one node's allocations: the truth that survives this process. One process has it at a time."""

    @property
    def doubt(self) -> str | None:
        """
        Why it may not hold all that was given: what it was before was damaged, and set aside. None: it holds all. A doubt
        outlives the process; only `trust` ends it.
        """

    def load(self) -> list[Entry]:
        """
        All entries that can be trusted, oldest first; empty, or with a snapshot among them. What is damaged is set aside and
        is a `doubt`. Raises StateFault if it cannot be read or written.
        """

    def trust(self) -> None:
        """Ends the doubt: what the journal holds has been found to be all. Raises StateFault, and then it stays."""

    def append(self, entry: Entry) -> None:
        """Adds an entry; when this returns it is on disk. Raises StateFault, and then the entry is not in the journal."""

    def rewrite(self, entries: Sequence[Entry]) -> None:
        """Puts these in place of all, at once or not at all. Raises StateFault."""

    def published(self) -> tuple[int, int] | None:
        """(epoch, seq) up to which the bus has the facts; (0, 0) at first. May lag by one fact. None: it is not known."""

    def mark_published(self, epoch: int, seq: int) -> None:
        """Remembers that. Never raises: a mark that is lost means that facts are published again under the same ids."""


class Occurrence(StrEnum):
    """What a driver may report of a GPU between two readings."""

    XID = "xid"
    """An error that the driver gives a number."""
    DOUBLE_BIT_ECC = "double-bit-ecc"
    SINGLE_BIT_ECC = "single-bit-ecc"
    """Corrected by the hardware; nobody's work is harmed."""
    UNAVAILABLE = "unavailable"
    """The driver has taken it out of use."""
    CHANGED = "changed"
    """Its MIG instances or what it needs to recover: a reading tells."""


class HardwareEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to a GPU, heard between two readings."""

    kind: Occurrence
    gpu: DeviceID | None
    """None: one that does not say who it is."""
    xid: int | None = None
    gpu_instance: int | None = None
    """Of the MIG instance it happened to; None: to the whole GPU."""
    compute_instance: int | None = None


class Listener(Protocol):
    """Whoever is to hear of the hardware between two readings. Called in the event loop."""

    def hear(self, event: HardwareEvent) -> None: ...

    def deaf(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        """
        Nothing can be heard for this reason, and of these GPUs therefore nobody knows how they are. None: all is heard.
        """


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver found."""

    topology: Topology
    health: Mapping[DeviceID, DeviceHealth]
    """Of all GPUs and NICs."""
    findings: tuple[str, ...] = ()
    """What is odd and was worked round: a GPU that does not answer, links that differ from either end."""
    awaiting_reset: frozenset[DeviceID] = frozenset()
    """Devices that work again only after a reset: lost, or the driver asks for one. One that is no longer here had it."""
    nameless: bool = False
    """A GPU is here that does not say who it is, so one that is missing may be that one, and had no reset."""


class Driver(Protocol):
    """Reads the hardware of this node."""

    @property
    def source(self) -> str:
        """`nvml`, `sysfs`, `described: dgx-a100`."""

    async def read(self) -> Inventory:
        """Reads everything anew. Raises DriverFault; a single lost device is reported in the inventory instead."""

    async def watch(self, listener: Listener) -> None:
        """Reports what happens between readings, until cancelled; returns at once where nothing is ever reported."""
