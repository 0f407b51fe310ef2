"""
Somebody else publishes under the ids that a node will use next. Its facts are stored all the same, and that is told.

The store drops a message whose id it has seen, and calls it a duplicate: without a look at what it has, the node would
believe that its facts are stored.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import killable, said
from outage_support import NODE, Listener, come_and_go, emptied, opened
from structlog.testing import capture_logs

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import POLL_SECONDS, Outbox
from topoalign.core import wire
from topoalign.core.model.events import (
    Allocation,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealthChanged,
    LedgerEvent,
    LedgerFact,
)
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.ports import Bus, Message, Stream
from topoalign.discovery.announcer import Announcer
from topoalign.runtime.fact_publisher import FactPublisher
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio


def forged(ledger: Ledger, ahead: int) -> Message:
    """What nobody of this node said, under the id that it will use next, or so many later."""
    event = AllocationReleased(
        node=NODE,
        epoch=ledger.state.epoch,
        seq=ledger.state.seq + 1 + ahead,
        allocation=AllocationID("1-1"),
        reason="released",
    )
    return wire.encode_event(event, 0)


@asynccontextmanager
async def speaking(ledger: Ledger, bus: Bus, clock: ManualClock) -> AsyncIterator[Outbox]:
    outbox = Outbox(ledger, bus, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        tasks.start_soon(outbox.watch)
        yield outbox
        tasks.cancel_scope.cancel()


async def facts(bus: Bus, count: int) -> list[tuple[str, LedgerEvent]]:
    """Ids and events of the first messages of the stream."""
    found: list[tuple[str, LedgerEvent]] = []
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NODE)) as messages:
        while len(found) < count:
            message = (await anext(messages)).message
            event = wire.decode_event(message)
            assert isinstance(event, LedgerFact)
            found.append((message.headers["Nats-Msg-Id"], event))
    return found


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    async with killable(tmp_path / "nats") as server, connect_bus(server.url) as connected:
        yield connected


async def test_facts_with_ids_used_by_others_are_stored_under_other_ids(bus: Bus, tmp_path: Path) -> None:
    """
    One by one, behind those that were under way with them. A snapshot follows at once: a listener, which has received the
    forged facts under these numbers, hears each number once and ends with what the node has.
    """
    clock, listener = ManualClock(), Listener(bus)
    with opened(tmp_path / "state", clock) as ledger, capture_logs() as logs:
        async with speaking(ledger, bus, clock) as outbox, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.listen)
            await emptied(ledger)
            await listener.agrees_with(ledger)
            for ahead in (0, 1, 2):
                await bus.publish(forged(ledger, ahead))
            come_and_go(ledger, 5)
            await emptied(ledger)
            stored = await facts(bus, 10)
            note = outbox.facts.note()
            await listener.agrees_with(ledger)
            tasks.cancel_scope.cancel()

    later = stored[4:]
    assert [5, 6, 2, 3, 4, 7] == [event.seq for _, event in later]
    assert [False] * 2 + [True] * 3 + [False] == [name.startswith(wire.event_id(event) + ".") for name, event in later]
    assert isinstance(later[-1][1], AllocationsSnapshot)
    assert [1, 2, 3, 4, 5, 6, 7] == [number for _, number in listener.numbers]
    assert 1 == len(listener.state.allocations)
    assert 3 == outbox.facts.taken
    told = [line for line in logs if line["event"].startswith("the id of a fact is taken")]
    assert 1 == len(told), "one cause, one line"
    assert "is another one" in told[0]["finding"]
    assert note is not None and note.startswith("3 facts went out under other ids than their own")


async def test_a_listener_that_believed_others_hears_everything_anew(bus: Bus, tmp_path: Path) -> None:
    """The forged fact came first under its number, so that the true one is taken for its repetition."""
    clock, listener = ManualClock(), Listener(bus)
    with opened(tmp_path / "state", clock) as ledger:
        async with speaking(ledger, bus, clock), anyio.create_task_group() as tasks:
            tasks.start_soon(listener.listen)
            come_and_go(ledger, 1)
            await emptied(ledger)
            await listener.agrees_with(ledger)
            lie = AllocationReleased(
                node=NODE,
                epoch=ledger.state.epoch,
                seq=ledger.state.seq + 1,
                allocation=next(iter(ledger.state.allocations)),
                reason="released",
            )
            await bus.publish(wire.encode_event(lie, 0))
            while listener.state.allocations:
                await anyio.lowlevel.checkpoint()
            ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: (DeviceID("GPU-9"),)})])
            await emptied(ledger)
            await clock.advance(POLL_SECONDS)
            await listener.agrees_with(ledger)
            tasks.cancel_scope.cancel()

        assert 2 == len(listener.state.allocations)


async def test_after_taken_ids_everything_is_announced_once() -> None:
    bus, clock = MemoryBus(), ManualClock()
    ledger = Ledger(NODE, MemoryJournal(), clock)
    async with speaking(ledger, bus, clock):
        await emptied(ledger)
        await bus.publish(forged(ledger, 0))
        ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: (DeviceID("GPU-0"),)})])
        await emptied(ledger)
        seqs = list[int]()
        for _ in range(3):
            await clock.advance(POLL_SECONDS)
            seqs.append(ledger.state.seq)

    assert [seqs[0]] * 3 == seqs
    assert 3 == seqs[0], "the first snapshot, the grant, and a snapshot"


async def test_what_is_said_of_the_hardware_is_stored_under_another_id_too() -> None:
    bus, clock = MemoryBus(), ManualClock()
    announcer = Announcer(bus, clock)
    mine = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices={})
    await bus.publish(msgspec.structs.replace(wire.encode_event(mine, 0), body=b"{}"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(announcer.run)
        announcer.submit(mine)
        async with bus.follow(Stream.NODES, wire.subject(mine), after=1) as messages:
            stored = (await anext(messages)).message
        tasks.cancel_scope.cancel()

    assert mine == wire.decode_event(stored)
    assert stored.headers["ce-id"] == stored.headers["Nats-Msg-Id"]
    assert stored.headers["ce-id"].startswith(wire.event_id(mine) + ".")
    assert 1 == announcer.facts.taken


async def test_taken_ids_are_logged_once_and_counted_in_a_note() -> None:
    bus = MemoryBus()
    publisher = FactPublisher(bus)
    with capture_logs() as logs:
        for number in range(10):
            await bus.publish(said(number, "topoalign.v1.allocation.x.granted"))
        for number in range(10):
            await publisher.publish(said(number))
    noted = publisher.note()

    assert 1 == len(logs)
    assert noted is not None and noted.startswith("10 facts")


async def test_a_fact_that_was_stored_and_not_confirmed_keeps_its_id() -> None:
    """The usual reason for a duplicate: the store has the fact itself."""
    bus = MemoryBus()
    publisher = FactPublisher(bus)

    assert (1, 1) == (await publisher.publish(said(1)), await publisher.publish(said(1)))
    assert (0, None) == (publisher.taken, publisher.note())
