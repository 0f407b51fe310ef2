"""The outbox notices what the stream has lost, also on a node where nothing happens, and says what the bus refuses."""

import anyio
import pytest
from bus_support import FailingBus

from topoalign.allocator.ledger.ledger import PUBLISHED_SECONDS, Ledger
from topoalign.allocator.ledger.outbox import POLL_SECONDS, Outbox
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.publisher import LONGEST_PAUSE
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio


async def test_an_idle_node_says_everything_anew_once_the_stream_has_lost_it() -> None:
    bus, clock = FailingBus(), ManualClock()
    ledger = Ledger(NodeName("node-1"), MemoryJournal(), clock)
    outbox = Outbox(ledger, bus, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        tasks.start_soon(outbox.watch)
        await clock.advance(3 * POLL_SECONDS)
        whole = ledger.state.seq
        bus.emptied = True
        await clock.advance(POLL_SECONDS)
        tasks.cancel_scope.cancel()

    assert (1, 2) == (whole, ledger.state.seq)
    assert 0 == len(ledger.pending)


async def test_a_stream_that_went_back_is_noticed_once() -> None:
    """From then on positions count from where it went back to."""
    clock = ManualClock()
    ledger = Ledger(NodeName("node-1"), MemoryJournal(), clock)
    outbox = Outbox(ledger, MemoryBus(), clock)
    seqs = list[int]()
    for position in (10, 0, 1, 2):
        await clock.advance(2 * PUBLISHED_SECONDS)
        outbox.notice(position)
        seqs.append(ledger.state.seq)

    assert [1, 2, 2, 2] == seqs


async def test_a_refusal_is_told_for_as_long_as_it_lasts_and_no_longer() -> None:
    """A bus that is away refuses nothing; one that takes a fact refuses nothing any more."""
    bus, clock = FailingBus(), ManualClock()
    full = BusRefused("the store is full", "make room")
    told: list[tuple[str | None, int]] = []
    async with anyio.create_task_group() as tasks:
        ledger = Ledger(NodeName("node-1"), MemoryJournal(), clock)
        outbox = Outbox(ledger, bus, clock)
        tasks.start_soon(outbox.run)
        for reason in (full, BusUnavailable("away"), full, None, full):
            bus.refusal = reason
            ledger.announce() if not ledger.pending else None
            await clock.advance(LONGEST_PAUSE)
            told.append((outbox.publisher.refusal, min(outbox.publisher.failures, 1)))
        tasks.cancel_scope.cancel()

    assert [("the store is full", 1), (None, 1), ("the store is full", 1), (None, 0), ("the store is full", 1)] == told
