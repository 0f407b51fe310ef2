"""Whoever polls at ticks wakes with all others whose period divides its own, and never sooner than it should."""

from hypothesis import given
from hypothesis import strategies as st

from topoalign.runtime.clock import ManualClock, until_tick


def test_periods_that_divide_one_another_end_at_the_same_moment() -> None:
    clock = ManualClock(12.25)

    assert (0.25, 0.75, 1.75) == tuple(until_tick(clock, period) for period in (0.5, 1.0, 2.0))


def test_at_a_tick_a_whole_period_is_left() -> None:
    assert 0.5 == until_tick(ManualClock(12.5), 0.5)


@given(st.floats(0, 1e9), st.sampled_from((0.5, 1.0, 2.0, 5.0)))
def test_the_wait_is_positive_and_at_most_the_period(now: float, period: float) -> None:
    wait = until_tick(ManualClock(now), period)

    assert 0 < wait <= period
