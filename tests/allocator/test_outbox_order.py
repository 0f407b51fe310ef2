"""Many facts are under way at once, and listeners hear them in the journal's order, each once, whatever the bus does."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import anyio
import pytest
from device_allocations_support import GPUS

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import MOST_FACTS, Outbox
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.events import Allocation, AllocationsSnapshot, LedgerEvent, LedgerFact
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.ports import Message, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")


class Journal(MemoryJournal):
    """Keeps what was marked."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[int] = []

    def mark_published(self, epoch: int, seq: int) -> None:
        self.marks.append(seq)
        super().mark_published(epoch, seq)


class PartialBus(MemoryBus):
    """Does not store some facts the first time, or stores them and does not say so; keeps how it was asked."""

    def __init__(self, not_stored: Collection[int] = (), not_said: Collection[int] = ()) -> None:
        super().__init__()
        self.not_stored, self.not_said = {*not_stored}, {*not_said}
        self.asked: list[list[int]] = []

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        self.asked.append([seq_of(message)])
        return await self.store(message)

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        self.asked.append([seq_of(message) for message in messages])
        positions: list[int | None] = []
        for message in messages:
            try:
                positions.append(await self.store(message))
            except BusUnavailable:
                positions.append(None)
        return positions

    async def store(self, message: Message) -> int:
        seq = seq_of(message)
        if seq in self.not_stored:
            self.not_stored.discard(seq)
            raise BusUnavailable("lost")
        position = await super().publish(message)
        if seq in self.not_said:
            self.not_said.discard(seq)
            raise BusUnavailable("not acknowledged")
        return position

    @property
    def stored(self) -> list[int]:
        return [seq_of(received.message) for received in self._logs[Stream.ALLOCATIONS].kept]


def seq_of(message: Message) -> int:
    event = wire.decode_event(message)
    assert isinstance(event, LedgerFact)
    return event.seq


async def published(bus: PartialBus, journal: Journal, facts: int = 6) -> Ledger:
    """A ledger with a snapshot and so many grants, and all of it published."""
    clock = ManualClock()
    ledger = Ledger(NODE, journal, clock)
    for _ in range(facts):
        ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: GPUS[:1]})])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Outbox(ledger, bus, clock).run)
        await clock.advance(60.0)
        tasks.cancel_scope.cancel()
    return ledger


async def test_what_waits_goes_out_at_once_and_is_marked_once() -> None:
    bus, journal = PartialBus(), Journal()
    ledger = await published(bus, journal)

    assert [[1, 2, 3, 4, 5, 6, 7]] == bus.asked
    assert [7] == journal.marks
    assert 0 == len(ledger.pending)


async def test_no_more_than_a_window_is_under_way() -> None:
    bus, journal = PartialBus(), Journal()
    await published(bus, journal, 2 * MOST_FACTS)

    assert [MOST_FACTS, MOST_FACTS, 1] == [len(asked) for asked in bus.asked]
    assert [MOST_FACTS, 2 * MOST_FACTS, 2 * MOST_FACTS + 1] == journal.marks


async def test_a_lost_acknowledgement_costs_neither_order_nor_repetition() -> None:
    """What is before it counts as published. It goes out alone then, and after it all that is left."""
    bus, journal = PartialBus(not_said={4}), Journal()
    ledger = await published(bus, journal)

    assert [[1, 2, 3, 4, 5, 6, 7], [4], [5, 6, 7]] == bus.asked
    assert [1, 2, 3, 4, 5, 6, 7] == bus.stored
    assert [3, 4, 7] == journal.marks
    assert 7 == ledger.state.seq


class DistantBus(MemoryBus):
    """A bus whose acknowledgements take 10 ms; keeps when it stored what."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.stored: dict[int, float] = {}

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        (position,) = await self.publish_all([message])
        assert position is not None
        return position

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        await self._clock.sleep(0.01)
        positions = []
        for message in messages:
            self.stored[seq_of(message)] = self._clock.monotonic()
            positions.append(await super().publish(message))
        return positions


async def test_at_150_grants_a_second_none_waits_for_the_one_before() -> None:
    """F11: one by one, with 10 ms each, the last of 300 facts would be a second late."""
    clock, granted = ManualClock(), {}
    bus, ledger = DistantBus(clock), Ledger(NODE, MemoryJournal(), clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Outbox(ledger, bus, clock).run)
        for _ in range(300):
            ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: GPUS[:1]})])
            granted[ledger.state.seq] = clock.monotonic()
            await clock.advance(1 / 150)
        await clock.advance(0.1)
        tasks.cancel_scope.cancel()

    assert 300 == len(granted)
    assert 0.025 > max(bus.stored[seq] - at for seq, at in granted.items())


async def test_while_the_bus_takes_nothing_the_oldest_goes_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, journal = PartialBus(), Journal()
    encoded, encode = [], wire.encode_event

    def counted(event: LedgerEvent, time: float) -> Message:
        encoded.append(event.seq)
        return encode(event, time)

    monkeypatch.setattr(wire, "encode_event", counted)
    clock, tries = ManualClock(), []
    ledger = Ledger(NODE, journal, clock)
    bus.not_stored = {1}

    async def refuse(message: Message, expected_last: int | None = None) -> int:
        tries.append(seq_of(message))
        raise BusUnavailable("away")

    bus.publish = refuse  # type: ignore[method-assign]  # a bus that refuses
    for _ in range(3):
        ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: GPUS[:1]})])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Outbox(ledger, bus, clock).run)
        await clock.advance(1.5)
        tasks.cancel_scope.cancel()

    assert [[1, 2, 3, 4]] == bus.asked
    assert [1, 1, 1, 1] == tries
    assert [1, 2, 3, 4, 1, 1, 1, 1] == encoded
    assert [] == journal.marks


@pytest.mark.parametrize("lost", [{1}, {3}, {3, 5}, {6}, {1, 2, 3}], ids=str)
async def test_a_later_fact_that_was_stored_first_is_followed_by_a_snapshot(lost: set[int]) -> None:
    """Of those under way some were not stored: they follow the others in the stream, and then all that is live."""
    bus, journal = PartialBus(not_stored=lost), Journal()
    ledger = await published(bus, journal)
    newest = [seq for seq in bus.stored if seq > 7]
    delivery = await heard_by(bus, lambda event: event.seq == newest[-1])

    assert {*range(1, 8)} <= {*bus.stored}
    assert len(bus.stored) == len({*bus.stored})
    assert newest
    assert newest[-1] == ledger.state.seq == delivery[-1].seq
    assert follow_one_another(delivery)


async def test_the_last_of_those_under_way_that_is_lost_is_out_of_no_order() -> None:
    """Nothing was stored after it: it goes out again, and no snapshot is needed."""
    bus, journal = PartialBus(not_stored={7}), Journal()
    ledger = await published(bus, journal)

    assert [1, 2, 3, 4, 5, 6, 7] == bus.stored
    assert 7 == ledger.state.seq


async def heard_by(bus: MemoryBus, is_last: Callable[[LedgerFact], bool]) -> list[LedgerFact]:
    """What a subscriber is given from the beginning on."""
    delivery: list[LedgerFact] = []
    async for each in Client(bus).allocations(since=0):
        if isinstance(each.event, LedgerFact):
            delivery.append(each.event)
            if is_last(each.event):
                break
    return delivery


def follow_one_another(facts: list[LedgerFact]) -> bool:
    """Without a gap or a repetition, but for snapshots, which stand for what they leave out."""
    return all(
        after.seq == before.seq + 1 or (after.seq > before.seq and isinstance(after, AllocationsSnapshot))
        for before, after in pairwise(facts)
    )


async def test_an_outbox_with_nothing_to_publish_keeps_nothing() -> None:
    """What was under way may be 4 MiB."""
    clock = ManualClock()
    ledger = Ledger(NODE, MemoryJournal(), clock)
    outbox = Outbox(ledger, MemoryBus(), clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        ledger.announce()
        await clock.advance(1.0)
        tasks.cancel_scope.cancel()

    assert (0, []) == (len(ledger.pending), outbox._due)
