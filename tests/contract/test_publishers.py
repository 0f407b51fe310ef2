"""What every user of the publisher keeps to, whatever the bus does: the allocator's outbox and discovery's announcer."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import pytest
from outage_support import NODE, come_and_go
from structlog.testing import capture_logs

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, Reading
from topoalign.core.ports import Bus, Message
from topoalign.discovery.announcer import Announcer
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.publisher import FIRST_PAUSE, LONGEST_PAUSE, Publisher, Source
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

AWAY = BusUnavailable("away")
FULL = BusRefused("the store is full", "make room")


class TroubledBus(MemoryBus):
    """A bus that confirms nothing while there is trouble, and may store it all the same."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.trouble: Unavailable | None = None
        self.stores = False
        """Whether it stores what it does not confirm."""
        self.tries: list[float] = []
        """When something was published, in seconds since the beginning."""
        self.kept: list[Message] = []
        """What was stored, each message once."""
        self._begin = clock.monotonic()

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        self.tries.append(round(self._clock.monotonic() - self._begin, 3))
        if self.trouble is not None and not self.stores:
            raise self.trouble
        position = await super().publish(message, expected_last)
        if message not in self.kept:
            self.kept.append(message)
        if self.trouble is not None:
            raise self.trouble
        return position


class Writer(Source, Protocol):
    """Whoever has facts to publish."""

    publisher: Publisher

    async def run(self) -> None: ...

    def write(self) -> None:
        """One fact more."""


class LedgerWriter(Outbox):
    """The allocator's outbox and the ledger that it publishes."""

    def __init__(self, bus: Bus, clock: ManualClock) -> None:
        self.ledger = Ledger(NODE, MemoryJournal(), clock)
        super().__init__(self.ledger, bus, clock)

    def write(self) -> None:
        come_and_go(self.ledger, 1)


class HealthWriter(Announcer):
    """Discovery's announcer, with readings of the health."""

    revision = 0

    def __init__(self, bus: Bus, clock: ManualClock) -> None:
        super().__init__(bus, clock)

    def write(self) -> None:
        self.revision += 1
        self.submit(DeviceHealthChanged(node=NODE, epoch=1, revision=self.revision, devices={}))


@pytest.fixture(params=[LedgerWriter, HealthWriter])
def made(request: pytest.FixtureRequest) -> Callable[[Bus, ManualClock], Writer]:
    writer: Callable[[Bus, ManualClock], Writer] = request.param
    return writer


@asynccontextmanager
async def at_work(writer: Writer) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        yield
        tasks.cancel_scope.cancel()


def numbers(bus: TroubledBus) -> list[int]:
    """The numbers of the facts that are stored, in the order of the stream."""
    events = map(wire.decode_event, bus.kept)
    return [event.revision if isinstance(event, Reading) else event.seq for event in events]


Made = Callable[[Bus, ManualClock], Writer]


async def test_a_confirmed_fact_is_published_once(made: Made) -> None:
    """What the bus has confirmed is due no more; the next fact goes out as soon as it is written."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    async with at_work(writer):
        await clock.advance(1.0)
        before = len(bus.tries)
        for _ in range(3):
            writer.write()
            await clock.advance(1.0)

    assert ([1.0, 2.0, 3.0], []) == (bus.tries[before:], writer.due())


async def test_the_pause_doubles_while_nothing_is_confirmed(made: Made) -> None:
    """The pause between two tries doubles up to the longest, and begins anew after a confirmation."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    async with at_work(writer):
        await clock.advance(0.0)
        bus.trouble, bus.tries = AWAY, []
        writer.write()
        await clock.advance(16.0)
        first, bus.trouble = [*bus.tries], None
        await clock.advance(LONGEST_PAUSE)
        bus.trouble, bus.tries = AWAY, []
        writer.write()
        await clock.advance(FIRST_PAUSE)

    assert [0.0, 0.2, 0.6, 1.4, 3.0, 6.2, 11.2] == first
    assert [21.0, 21.2] == bus.tries


async def test_an_unconfirmed_fact_is_repeated_and_stored_once(made: Made) -> None:
    """A fact that was stored without a confirmation is repeated under its id, so the stream has it once."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    async with at_work(writer):
        await clock.advance(0.0)
        stored = len(bus.kept)
        bus.trouble, bus.stores, bus.tries = AWAY, True, []
        writer.write()
        await clock.advance(1.0)
        bus.trouble = None
        await clock.advance(LONGEST_PAUSE)

    assert (1, 4, []) == (len(bus.kept) - stored, len(bus.tries), writer.due())


async def test_facts_are_stored_in_order_through_an_outage(made: Made) -> None:
    """Facts that were written during outages reach the stream in the order in which they were written."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    async with at_work(writer):
        for trouble in (None, AWAY, None, FULL, AWAY, None):
            bus.trouble = trouble
            for _ in range(3):
                writer.write()
                await clock.advance(0.3)
        await clock.advance(LONGEST_PAUSE)

    found = numbers(bus)
    assert (sorted(set(found)), []) == (found, writer.due())


async def test_each_reason_is_logged_once_until_a_confirmation(made: Made) -> None:
    """Reasons that come in turns are logged once each, and again after the bus has confirmed something."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    with capture_logs() as logs:
        async with at_work(writer):
            for _ in range(2):
                writer.write()
                for trouble in (AWAY, FULL, AWAY, FULL, None):
                    bus.trouble = trouble
                    writer.write()
                    await clock.advance(LONGEST_PAUSE)

    assert ["away", "the store is full"] * 2 == [
        line["finding"] for line in logs if line["event"] == "bus does not confirm"
    ]
    assert 2 == len([line for line in logs if line["event"] == "bus confirms again"])


async def test_a_refusal_is_shown_while_it_lasts(made: Made) -> None:
    """A bus that refuses says why for as long as it does; one that is away refuses nothing."""
    clock = ManualClock()
    bus = TroubledBus(clock)
    writer = made(bus, clock)
    shown: list[str | None] = []
    async with at_work(writer):
        for trouble in (FULL, AWAY, FULL, None):
            bus.trouble = trouble
            writer.write()
            await clock.advance(LONGEST_PAUSE)
            shown.append(writer.publisher.refusal)

    assert ["the store is full", None, "the store is full", None] == shown
