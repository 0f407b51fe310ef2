"""Long work gives the event loop a turn when it has run for long, and not before."""

from itertools import count

import anyio
import pytest

from topoalign.runtime.request_turns import LONGEST_SECONDS, TaskTurns
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


async def test_other_tasks_run_once_for_each_turn() -> None:
    clock, others = ManualClock(), count()
    seen, turns = [], TaskTurns(clock)

    async def run() -> None:
        while True:
            next(others)
            await anyio.lowlevel.checkpoint()

    async with background() as tasks:
        tasks.start_soon(run)
        await anyio.lowlevel.checkpoint()
        for worked in (0.0, 0.6, 0.6, 0.0, 1.0):
            clock._now += worked * LONGEST_SECONDS
            await turns.give()
            seen.append(next(others))

    assert [0, 0, 1, 0, 1] == [later - earlier - 1 for earlier, later in zip([seen[0] - 1, *seen], seen, strict=False)]
