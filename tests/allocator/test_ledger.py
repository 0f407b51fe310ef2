"""The ledger: what it records survives, in order and without gaps, whatever happens in between."""

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.core.model.errors import NotFound, StateFault
from topoalign.core.model.events import Allocation, AllocationsSnapshot, Owner
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.ports import JournalEntry
from topoalign.core.state.fold import NodeState, replay
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_journal import MemoryJournal

NODE = NodeName("node-1")


def owner(name: str) -> Owner:
    return Owner(namespace=Namespace("default"), pod=PodName(name), container=ContainerName("main"))


def grant(ledger: Ledger, *devices: str) -> AllocationID:
    allocation = Allocation(id=ledger.next_id(), devices={GPU: tuple(map(DeviceID, devices))})
    ledger.grant([allocation])
    return allocation.id


def restarted(journal: MemoryJournal, **options: int) -> Ledger:
    return Ledger(NODE, journal, ManualClock(), **options)


class FailingJournal(MemoryJournal):
    """A journal on a disk that fails when told to."""

    failing = False

    def forget_published(self) -> None:
        self._published = None

    def append(self, entry: JournalEntry) -> None:
        if self.failing:
            raise StateFault("cannot write the journal", "make room")
        super().append(entry)

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        if self.failing:
            raise StateFault("cannot rewrite the journal", "make room")
        super().rewrite(entries)


def test_a_new_ledger_begins_with_a_snapshot_of_nothing() -> None:
    ledger = restarted(MemoryJournal())

    assert ledger.state.seq == 1
    assert isinstance(ledger.pending[0][0], AllocationsSnapshot)


def test_a_restart_has_the_same_allocations_under_a_new_epoch() -> None:
    """So a state directory that was restored from an old copy never repeats a number that was said before."""
    journal = MemoryJournal()
    before = restarted(journal)
    grant(before, "GPU-0", "GPU-1")
    gone = grant(before, "GPU-2")
    before.release([gone], "released")

    after = restarted(journal)

    assert before.state.allocations == after.state.allocations
    assert before.state.epoch < after.state.epoch
    assert 1 == after.state.seq
    assert 2 == restarted(journal).state.epoch - before.state.epoch


def test_unpublished_facts_are_still_pending_after_a_restart() -> None:
    """Facts that were not published are still pending after a restart, and the others are not."""
    journal = MemoryJournal()
    before = restarted(journal)
    grant(before, "GPU-0")
    before.published([before.pending[0][0]])
    grant(before, "GPU-1")
    waiting = [event for event, _ in before.pending]

    after = restarted(journal)

    assert waiting == [event for event, _ in after.pending][:-1]
    assert isinstance(after.pending[-1][0], AllocationsSnapshot)


def test_a_grant_that_the_disk_refuses_changes_nothing() -> None:
    journal = FailingJournal()
    ledger = restarted(journal)
    before, waiting = ledger.state, list(ledger.pending)
    journal.failing = True
    with pytest.raises(StateFault):
        grant(ledger, "GPU-0")

    assert before == ledger.state
    assert waiting == list(ledger.pending)


def test_an_unconfirmed_node_with_a_full_disk_does_not_start_in_its_epoch() -> None:
    """
    A node with an unconfirmed record whose disk is full does not come up in its old epoch. Of what was lost, numbers of
    that epoch may have been received already.
    """
    journal = FailingJournal()
    restarted(journal)
    journal.failing, journal.unconfirmed = True, "it was damaged"

    with pytest.raises(StateFault):
        restarted(journal)


def test_a_start_on_a_lost_journal_repeats_no_epoch() -> None:
    """
    A start on a lost journal repeats no epoch that began in the same millisecond. Its snapshot may have been received
    although nobody confirmed it.
    """
    delivery = restarted(MemoryJournal())
    lost = MemoryJournal()
    lost.unconfirmed = "it is missing"

    assert delivery.state.epoch < restarted(lost).state.epoch


class RefusesRewrites(MemoryJournal):
    """A disk with room for one more line, but not for a second copy of the journal."""

    full = False

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        if self.full:
            raise StateFault("cannot rewrite the journal", "make room")
        super().rewrite(entries)


def test_a_grant_stands_when_only_the_compaction_after_it_fails() -> None:
    """The entry is on disk by then, so answering with an error would hide an allocation that was made."""
    journal = RefusesRewrites()
    ledger = restarted(journal, compact_after=3)
    journal.full = True
    names = [grant(ledger, f"GPU-{number}") for number in range(6)]

    assert names == list(ledger.state.allocations)
    assert ledger.state.digest == restarted_read_only(journal).digest


def restarted_read_only(journal: MemoryJournal) -> NodeState:
    events = [event for entry in journal.load() for event in entry.events]
    newest = max(at for at, event in enumerate(events) if isinstance(event, AllocationsSnapshot))
    return replay(NODE, events[newest:])


def test_a_node_whose_disk_is_full_at_its_start_comes_up_with_what_it_had() -> None:
    journal = FailingJournal()
    before = restarted(journal)
    name = grant(before, "GPU-0")
    journal.failing = True
    after = restarted(journal)
    with pytest.raises(StateFault):
        grant(after, "GPU-1")
    complaint = after.faults.newest
    journal.failing = False
    grant(after, "GPU-2")

    assert complaint is not None
    assert name in after.state.allocations
    assert after.faults.newest is None
    assert after.state.digest == restarted_read_only(journal).digest


def test_many_requests_for_a_snapshot_at_once_are_one_snapshot() -> None:
    ledger = restarted(MemoryJournal())
    grant(ledger, "GPU-0")
    places = {ledger.announce() for _ in range(50)}

    assert 1 == len(places)
    assert 3 == len(ledger.pending)


def test_without_a_published_mark_the_newest_snapshot_stands_for_all() -> None:
    """
    Where it is not known what was published, the newest snapshot stands for all facts before it. Old facts said again after
    newer ones could make a listener believe them.
    """
    journal = FailingJournal()
    before = restarted(journal)
    grant(before, "GPU-0")
    before.announce()
    journal.forget_published()
    after = restarted(journal)

    assert [AllocationsSnapshot] * 2 == [type(event) for event, _ in after.pending]
    assert before.state.allocations == after.state.allocations


def test_releasing_what_is_not_live_is_not_found_and_releases_nothing() -> None:
    ledger = restarted(MemoryJournal())
    live = grant(ledger, "GPU-0")
    with pytest.raises(NotFound):
        ledger.release([live, AllocationID("never")], "released")

    assert [live] == list(ledger.state.allocations)


def test_the_journal_stays_short_however_much_happens() -> None:
    journal = MemoryJournal()
    ledger = restarted(journal, compact_after=10)
    longest = 0
    for number in range(500):
        ledger.release([grant(ledger, f"GPU-{number % 8}")], "released")
        while ledger.pending:
            ledger.published([ledger.pending[0][0]])
        longest = max(longest, len(journal.load()))

    assert longest <= 12


def test_a_bus_that_stays_away_costs_bounded_memory() -> None:
    """A bus that stays away costs bounded memory, and a snapshot makes listeners whole."""
    journal = MemoryJournal()
    ledger = restarted(journal, compact_after=10, pending_limit=50)
    for number in range(500):
        ledger.release([grant(ledger, f"GPU-{number % 8}")], "released")
    live = grant(ledger, "GPU-7")

    assert len(ledger.pending) <= 50 + 10 + 2
    assert ledger.dropped > 0
    assert [live] == list(replay(NODE, [event for event, _ in ledger.pending]).allocations)


def test_a_fact_dropped_on_its_way_takes_nothing_from_those_that_wait() -> None:
    """
    A fact that was dropped while it was on its way takes nothing from those that wait. The bus confirms it after a snapshot
    has taken its place, which the bus has not received.
    """
    journal = MemoryJournal()
    ledger = restarted(journal, compact_after=5, pending_limit=2)
    on_its_way = ledger.pending[0][0]
    for number in range(5):
        grant(ledger, f"GPU-{number}")
    waiting = list(ledger.pending)
    ledger.published([on_its_way])

    assert [AllocationsSnapshot] == [type(event) for event, _ in waiting]
    assert waiting == list(ledger.pending)
    assert (0, 0) == journal.published()


class LedgerMachine(RuleBasedStateMachine):
    """
    Any mixture of grants, bindings, releases, publications, failing disks and restarts, against a plain dictionary.
    """

    live = Bundle("live")

    @initialize()
    def start(self) -> None:
        self.journal = FailingJournal()
        self.ledger = restarted(self.journal, compact_after=5, pending_limit=12)
        self.expected: dict[AllocationID, tuple[str, ...]] = {}
        self.delivery: list[NodeState] = [NodeState(node=NODE)]
        self.number = 0

    @rule(target=live, devices=st.integers(1, 3), failing=st.booleans())
    def grant(self, devices: int, failing: bool) -> AllocationID:
        names = tuple(f"GPU-{self.number + n}" for n in range(devices))
        self.number += devices
        allocation = Allocation(id=self.ledger.next_id(), devices={GPU: tuple(map(DeviceID, names))})
        self.journal.failing = failing
        try:
            self.ledger.grant([allocation])
            self.expected[allocation.id] = names
        except StateFault:
            assert failing
        self.journal.failing = False
        return allocation.id

    @rule(name=live)
    def bind(self, name: AllocationID) -> None:
        if name in self.expected:
            self.ledger.bind([Binding(name, owner(name))])

    @rule(name=live)
    def release(self, name: AllocationID) -> None:
        try:
            self.ledger.release([name], "released")
            del self.expected[name]
        except NotFound:
            assert name not in self.expected

    @rule()
    def publish_some(self) -> None:
        for _ in range(3):
            if self.ledger.pending:
                event, _time = self.ledger.pending[0]
                self.delivery.append(self.delivery[-1].apply(event))
                self.ledger.published([event])

    @rule(lost=st.booleans())
    def restart(self, lost: bool) -> None:
        if lost:
            self.journal.forget_published()
        self.ledger = restarted(self.journal, compact_after=5, pending_limit=12)

    @invariant()
    def state_is_what_was_granted_and_not_released(self) -> None:
        live = {name: a.devices[GPU] for name, a in self.ledger.state.allocations.items()}
        assert self.expected == live

    @invariant()
    def sequence_numbers_have_no_gap(self) -> None:
        events = [event for entry in self.journal.load() for event in entry.events]
        places = [(event.epoch, event.seq) for event in events]
        snapshots = [
            place for event, place in zip(events, places, strict=True) if isinstance(event, AllocationsSnapshot)
        ]
        epoch, first = snapshots[-1]
        since = places[places.index(snapshots[-1]) :]
        assert [(epoch, first + more) for more in range(len(since))] == since
        assert sorted(set(places)) == places

    @invariant()
    def the_journal_alone_gives_the_state(self) -> None:
        assert self.ledger.state.digest == restarted_read_only(self.journal).digest

    @invariant()
    def a_listener_that_hears_what_is_pending_has_the_state(self) -> None:
        state = self.delivery[-1]
        for event, _time in self.ledger.pending:
            if not isinstance(event, AllocationsSnapshot) and (event.epoch, event.seq) > (state.epoch, state.seq + 1):
                continue  # dropped facts: the snapshot that follows heals the gap
            state = state.apply(event)
        assert self.ledger.state.digest == state.digest


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.anyio
async def test_a_waiter_for_a_version_is_woken_by_the_first_greater_one() -> None:
    """
    Who waits past a version is woken by the first greater one, and by none before. Also where several changes come before
    anybody is woken, and where some wait on while others are done.
    """
    ledger = restarted(MemoryJournal())
    began = ledger.version
    woken: dict[int, int] = {}

    async def wait(version: int) -> None:
        await ledger.wait_past(version)
        woken[version] = ledger.version

    async with anyio.create_task_group() as tasks:
        for version in range(began, began + 6):
            tasks.start_soon(wait, version)
        for changes in (1, 2, 1, 2):
            await all_tasks_blocked()
            for _ in range(changes):
                grant(ledger)
            await all_tasks_blocked()

            assert set(range(began, ledger.version)) == woken.keys()

    assert {began: began + 1, began + 1: began + 3, began + 2: began + 3} == {
        version: at for version, at in woken.items() if version < began + 3
    }
