"""Polls at ticks wake with all others whose period divides their own; a controlled clock lets all tasks run meanwhile."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.runtime.clock import until_tick
from topoalign.testing.manual_clock import TURNS, ManualClock, all_tasks_blocked


def test_periods_that_divide_one_another_end_at_the_same_moment() -> None:
    clock = ManualClock(12.25)

    assert (0.25, 0.75, 1.75) == tuple(until_tick(clock, period) for period in (0.5, 1.0, 2.0))


def test_at_a_tick_a_whole_period_is_left() -> None:
    assert 0.5 == until_tick(ManualClock(12.5), 0.5)


@given(st.floats(0, 1e9), st.sampled_from((0.5, 1.0, 2.0, 5.0)))
def test_the_wait_is_positive_and_at_most_the_period(now: float, period: float) -> None:
    wait = until_tick(ManualClock(now), period)

    assert 0 < wait <= period


@pytest.mark.anyio
@pytest.mark.parametrize("turns", [1, 4 * TURNS])
async def test_a_task_that_needs_many_turns_has_them_all(turns: int) -> None:
    done, never = 0, anyio.Event()

    async def work() -> None:
        nonlocal done
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
            done += 1
        await never.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert turns == done
