"""The control program as a client: whatever it answers, or whoever answers in its place, costs a bounded time and memory."""

import os
from pathlib import Path

import anyio
import pytest

from topoalign.mps.control import CALL_SECONDS, LONGEST_ANSWER, Control
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio


def control_by(folder: Path, clock: ManualClock, program: str) -> Control:
    """A control program that does this, whatever it is told."""
    file = folder / "nvidia-cuda-mps-control"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    return Control(str(file), folder, ("GPU-0",), os.environ, clock)


@pytest.mark.parametrize(("size", "taken"), [(LONGEST_ANSWER, True), (LONGEST_ANSWER + 1, False), (10**7, False)])
async def test_an_answer_that_is_too_long_is_none(size: int, taken: bool, tmp_path: Path) -> None:
    """Of one without end all that is said in five seconds would be a gigabyte."""
    control = control_by(tmp_path, ManualClock(), f"exec head -c {size} /dev/zero")

    assert taken is await control.answers()


async def test_a_client_that_does_not_end_is_ended_at_the_deadline(tmp_path: Path) -> None:
    clock = ManualClock()
    control = control_by(tmp_path, clock, "trap '' HUP INT PIPE TERM; while :; do sleep 0.1; done")
    answers: list[bool] = []

    async def ask() -> None:
        answers.append(await control.answers())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await all_tasks_blocked()
            await clock.advance(CALL_SECONDS)

    assert [False] == answers
