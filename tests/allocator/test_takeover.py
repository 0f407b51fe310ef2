"""One allocator follows another: by locks alone, with deadlines, and never both at once."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from kubelet_support import NODE

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.state_dir import StateInUse
from topoalign.allocator.takeover import (
    POLL_SECONDS,
    RECEIVE_SECONDS,
    STEP_SECONDS,
    VACANT_SECONDS,
    WAIT_SECONDS,
    Vacancy,
    hardware_known,
    open_in_turn,
    wait_for_successor,
)
from topoalign.core.model.errors import HardwareUnknown
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio


async def at_once() -> None:
    """Ready to take over."""


async def until(clock: ManualClock, seconds: float, true: Callable[[], bool]) -> None:
    while not true():
        await clock.advance(seconds)
        await anyio.lowlevel.checkpoint()


async def test_without_a_running_allocator_a_new_one_does_not_wait(tmp_path: Path) -> None:
    async def never() -> None:
        raise AssertionError("there is nobody to take over")

    async with open_in_turn(tmp_path / "state", NODE, ManualClock(), never) as journal:
        assert [] == journal.load()


async def test_a_process_that_is_not_to_take_over_is_refused_with_the_pid(tmp_path: Path) -> None:
    """A process that is not to take over is refused with the pid of the running one."""
    with open_journal(tmp_path, NODE), pytest.raises(StateInUse, match=r"in use by another allocator, pid \d+") as told:
        async with open_in_turn(tmp_path, NODE, ManualClock(), None):
            raise AssertionError("two at once")

    assert "--take-over" in told.value.remedy
    assert not (tmp_path / "successor").exists()


async def test_a_process_that_is_not_ready_asks_nothing_of_the_running_one(tmp_path: Path) -> None:
    async def not_ready() -> None:
        raise HardwareUnknown(NODE, "nothing was received of it")

    with open_journal(tmp_path, NODE), pytest.raises(HardwareUnknown):
        async with open_in_turn(tmp_path, NODE, ManualClock(), not_ready):
            raise AssertionError("two at once")

    assert not (tmp_path / "successor").exists()


async def test_the_running_process_hands_its_record_to_its_successor(tmp_path: Path) -> None:
    """The running process notices a successor, and its record passes on."""
    clock = ManualClock()
    order: list[str] = []

    async def succeed() -> None:
        async with open_in_turn(tmp_path, NODE, clock, at_once) as journal:
            journal.load()
            order.append("successor has it")

    async with anyio.create_task_group() as tasks:
        with open_journal(tmp_path, NODE) as journal:
            journal.load()
            tasks.start_soon(succeed)
            hears = anyio.Event()

            async def hear() -> None:
                await wait_for_successor(tmp_path, clock)
                hears.set()

            tasks.start_soon(hear)
            await until(clock, POLL_SECONDS, hears.is_set)
            order.append("asked")
        await until(clock, STEP_SECONDS, lambda: len(order) == 2)

    assert ["asked", "successor has it"] == order


async def test_a_successor_that_has_taken_over_does_not_hold_the_lock(tmp_path: Path) -> None:
    """
    A successor that has taken over is not taken for one that waits. It released the successor lock when it got the
    directory: else it would hand over to itself.
    """
    clock = ManualClock()
    delivery: list[str] = []

    async def hear() -> None:
        await wait_for_successor(tmp_path, clock)
        delivery.append("asked")

    async with anyio.create_task_group() as tasks:
        with open_journal(tmp_path, NODE):
            taken = anyio.Event()

            async def succeed() -> None:
                async with open_in_turn(tmp_path, NODE, clock, at_once):
                    taken.set()
                    await anyio.sleep_forever()

            tasks.start_soon(succeed)
            await all_tasks_blocked()
        await until(clock, STEP_SECONDS, taken.is_set)
        tasks.start_soon(hear)
        await clock.advance(10 * POLL_SECONDS)
        tasks.cancel_scope.cancel()

    assert [] == delivery


async def test_one_that_does_not_hand_over_is_named_at_the_deadline(tmp_path: Path) -> None:
    clock = ManualClock()
    told: list[StateInUse] = []

    async def succeed() -> None:
        try:
            async with open_in_turn(tmp_path, NODE, clock, at_once):
                pass
        except StateInUse as fault:
            told.append(fault)

    with open_journal(tmp_path, NODE):
        began = clock.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(succeed)
            await until(clock, 1.0, lambda: bool(told))

    assert WAIT_SECONDS <= clock.monotonic() - began <= WAIT_SECONDS + 2
    assert "pid" in told[0].finding
    assert "did not within 20 s" in told[0].finding


async def test_a_former_allocator_asks_for_a_restart_when_no_other_runs(
    tmp_path: Path,
) -> None:
    """
    A process that has handed over asks to be started again once no process has the node for a minute. A new process
    that asked for it and died would else leave the node to nobody: the former one only waits to be stopped.
    """
    clock = ManualClock()
    vacancy = Vacancy(tmp_path, clock)
    with open_journal(tmp_path, NODE):
        in_use = vacancy.restart_reason()
    left = vacancy.restart_reason()
    await clock.advance(VACANT_SECONDS - 1)
    with open_journal(tmp_path, NODE):
        taken = vacancy.restart_reason()
    left_again = vacancy.restart_reason()
    await clock.advance(VACANT_SECONDS - 1)
    not_for_a_minute = vacancy.restart_reason()
    await clock.advance(1)

    assert [None] * 5 == [in_use, left, taken, left_again, not_for_a_minute]
    assert "no process has this node" in (vacancy.restart_reason() or "")


async def refused(call: Callable[[], Awaitable[None]], clock: ManualClock) -> list[HardwareUnknown]:
    told: list[HardwareUnknown] = []

    async def run() -> None:
        try:
            await call()
        except HardwareUnknown as error:
            told.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(clock, RECEIVE_SECONDS / 4, lambda: bool(told))
    return told


async def test_who_has_no_hardware_to_offer_takes_nothing_over(tmp_path: Path) -> None:
    clock = ManualClock()
    (told,) = await refused(lambda: hardware_known(MemoryBus(), NODE, clock), clock)

    assert "nothing is taken over" in told.finding
