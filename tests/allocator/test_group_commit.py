"""Allocates that are ready together are recorded with one sync, and each is judged and answered as if it came alone."""

from collections.abc import Sequence

import anyio
import pytest
from device_allocations_support import GPUS, Node

from topoalign.core.model.errors import DeviceInUse, DeviceUnusable, StateFault
from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.ports import JournalEntry
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio


class CountingJournal(MemoryJournal):
    """Counts what it is given, and refuses it where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.appended: list[JournalEntry] = []
        self.full = False

    def append(self, entry: JournalEntry) -> None:
        if self.full:
            raise StateFault("the disk is full", "make room")
        self.appended.append(entry)
        super().append(entry)


Answer = tuple[Allocation, ...] | Exception


class Callers:
    """A node, and callers that all ask in the same turn of the event loop."""

    def __init__(self) -> None:
        self.journal = CountingJournal()
        self.node = Node(self.journal)
        self.journal.appended.clear()
        self.answers: dict[int, Answer] = {}

    async def ask(self, number: int, devices: Sequence[DeviceID]) -> None:
        try:
            self.answers[number] = await self.node.device_allocations.allocate(GPU, [devices])
        except (DeviceInUse, DeviceUnusable, StateFault) as error:
            self.answers[number] = error

    async def ask_all(self, *asked: Sequence[DeviceID]) -> list[Answer]:
        async with anyio.create_task_group() as tasks:
            for number, devices in enumerate(asked):
                tasks.start_soon(self.ask, number, devices)
        return [self.answers[number] for number in range(len(asked))]

    @property
    def facts(self) -> list[list[str]]:
        """The kinds of the facts of each entry since the start."""
        return [[type(event).__name__ for event in entry.events] for entry in self.journal.appended]

    @property
    def held(self) -> list[list[DeviceID]]:
        return [sorted(each.device_ids) for each in self.node.ledger.state.allocations.values()]


@pytest.fixture
def callers() -> Callers:
    return Callers()


async def test_callers_of_one_moment_share_one_entry_of_the_journal(callers: Callers) -> None:
    answers = await callers.ask_all(*([gpu] for gpu in GPUS))

    assert [["AllocationGranted"] * 8] == callers.facts
    assert [[gpu] for gpu in GPUS] == callers.held
    live = [*callers.node.ledger.state.allocations.values()]
    assert live == [granted for each in answers for granted in each]  # type: ignore[union-attr]  # all are answered
    assert [*range(2, 10)] == [event.seq for event in callers.journal.appended[0].events]


async def test_one_that_is_refused_drops_out_alone(callers: Callers) -> None:
    """Also where what is wrong came up after it was checked: GPU 1 fails while the calls wait for their turn."""
    broken = dict.fromkeys(GPUS, DeviceHealth(state=HealthState.HEALTHY))
    broken[GPUS[1]] = DeviceHealth(state=HealthState.UNHEALTHY, reason="fell off the bus")

    async def breaks() -> None:
        callers.node.hear_health(callers.node.ledger, 2, broken)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(callers.ask, number, [GPUS[number]])
        tasks.start_soon(breaks)

    assert [[GPUS[0]], [GPUS[2]]] == callers.held
    assert isinstance(callers.answers[1], DeviceUnusable)
    assert "fell off the bus" in str(callers.answers[1])
    assert [["AllocationGranted"] * 2] == callers.facts


async def test_a_caller_that_gives_up_before_the_record_is_given_nothing(callers: Callers) -> None:
    """Nobody would use what it is given. The calls of the same moment are recorded."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(callers.ask, 0, [GPUS[0]])
        with anyio.CancelScope() as gives_up:
            async with anyio.create_task_group() as given_up:
                given_up.start_soon(callers.ask, 1, [GPUS[1]])
                while not callers.node.device_allocations._commits._queue[1:]:
                    await anyio.lowlevel.checkpoint()
                gives_up.cancel()

    assert [[GPUS[0]]] == callers.held
    assert {0} == callers.answers.keys()


async def test_of_two_that_ask_for_one_device_the_second_asks_the_kubelet(callers: Callers) -> None:
    """Both were told that it is free. The kubelet shows it with the first, so the second is refused."""
    callers.node.kubelet.show("train", GPUS[0])

    first, second, third = await callers.ask_all([GPUS[0]], [GPUS[0], GPUS[1]], [GPUS[2]])

    assert [GPUS[0]] == sorted(first[0].device_ids)  # type: ignore[index]  # answered
    assert isinstance(second, DeviceInUse)
    assert [GPUS[2]] == sorted(third[0].device_ids)  # type: ignore[index]  # answered
    assert [["AllocationGranted"] * 2] == callers.facts
    assert 1 == callers.node.kubelet.asked


async def test_a_device_that_nobody_shows_goes_to_the_later_of_two(callers: Callers) -> None:
    """As where they come one after the other: the record of the first has outlived its container."""
    first, second = await callers.ask_all([GPUS[0]], [GPUS[0], GPUS[1]])

    assert not isinstance(first, Exception)
    assert not isinstance(second, Exception)
    assert [["AllocationGranted"], ["AllocationReleased", "AllocationGranted"]] == callers.facts
    assert [[GPUS[0], GPUS[1]]] == callers.held


async def test_an_answer_of_the_kubelet_is_not_used_for_a_later_grant(callers: Callers) -> None:
    """While the kubelet is asked about the old record of GPU 0, that ends and the GPU is given to somebody else."""
    node = callers.node
    (old,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    callers.journal.appended.clear()

    async def given_anew() -> None:
        node.ledger.release([old.id], "gone")
        await callers.ask(1, [GPUS[0]])
        node.kubelet.show("new", GPUS[0])

    node.kubelet.meanwhile = given_anew
    await callers.ask(0, [GPUS[0], GPUS[1]])

    assert isinstance(callers.answers[0], DeviceInUse)
    assert [[GPUS[0]]] == callers.held
    assert 2 == node.kubelet.asked


async def test_a_disk_that_refuses_refuses_all_and_nothing_has_changed(callers: Callers) -> None:
    state, version = callers.node.ledger.state, callers.node.ledger.version
    callers.journal.full = True
    answers = await callers.ask_all([GPUS[0]], [GPUS[1]])
    after, pending = callers.node.ledger.state, [event for event, _ in callers.node.ledger.pending]
    callers.journal.full = False
    again = await callers.ask_all([GPUS[0]], [GPUS[1]])

    assert [True, True] == [isinstance(each, StateFault) for each in answers]
    assert state is after
    assert version + 2 >= callers.node.ledger.version
    assert [] == [event for event in pending if isinstance(event, AllocationGranted)]
    assert [False, False] == [isinstance(each, Exception) for each in again]
    assert [["AllocationGranted"] * 2] == callers.facts


@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize("turns", range(4))
async def test_a_caller_who_gives_up_costs_the_others_nothing(callers: Callers, who: int, turns: int) -> None:
    """Whoever it is, also the first, on whose turn the others wait. What it asked for is recorded whole or not at all."""
    scope = anyio.CancelScope()

    async def gives_up(number: int) -> None:
        with scope:
            await callers.ask(number, [GPUS[number]])

    async def cancels() -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            if number == who:
                tasks.start_soon(gives_up, number)
            else:
                tasks.start_soon(callers.ask, number, [GPUS[number]])
        tasks.start_soon(cancels)

    others = [[GPUS[number]] for number in range(4) if number != who]
    assert others == [each for each in callers.held if each != [GPUS[who]]]
    assert 1 == len(callers.facts)
    assert {*range(4)} - {who} <= callers.answers.keys()


async def test_calls_of_later_moments_are_later_entries(callers: Callers) -> None:
    """Nobody waits for callers to come: one alone is recorded in the next turn of the loop."""
    for gpu in GPUS[:3]:
        await callers.ask_all([gpu])

    assert [["AllocationGranted"]] * 3 == callers.facts


async def test_a_block_that_fails_records_nothing(callers: Callers) -> None:
    ledger = callers.node.ledger
    (old,) = await callers.node.device_allocations.allocate(GPU, [[GPUS[0]]])
    before = ledger.state
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger.release([old.id], "gone")
        assert old.id not in ledger.state.allocations
        _ = 1 // 0

    assert before is ledger.state
    assert not any(isinstance(event, AllocationReleased) for event, _ in ledger.pending)
