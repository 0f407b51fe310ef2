"""Requests work in slices, one in each round of the event loop, in the order of fair shares."""

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from topoalign.runtime.request_turns import LONGEST_SECONDS, WORKING, RequestTurns, TaskTurns, Working, take_turn
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


class Worker:
    """Requests whose work is to move a clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.turns = RequestTurns(self.clock.monotonic)
        self.done: list[str] = []
        self.slices: list[str] = []

    async def answer(self, peer: str, name: str, slices: int, begun: Callable[[], object] = lambda: None) -> None:
        working = Working((peer,), self.turns)
        WORKING.set(working)
        await working.give()
        begun()
        within = TaskTurns(self.clock)
        for _ in range(slices):
            self.slices.append(name)
            self.clock._now += 2 * LONGEST_SECONDS
            await within.give()
        self.done.append(name)


async def test_a_small_request_ends_long_before_the_large_ones_of_others() -> None:
    """T07: 16 clients of one address with 20 slices each, and one of another address with 2."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        for number in range(16):
            tasks.start_soon(worker.answer, "hostile", f"large-{number}", 20)
        while len(worker.slices) < 50:
            await anyio.lowlevel.checkpoint()
        before = len(worker.slices)
        tasks.start_soon(worker.answer, "honest", "small", 2)

    last = max(place for place, name in enumerate(worker.slices) if name == "small")
    assert last - before <= 4
    assert "small" == worker.done[0]
    assert 16 * 20 + 2 == len(worker.slices)


async def test_a_request_that_arrives_during_a_slice_has_the_next_one() -> None:
    """Its bytes are read, and its task is started, in the iterations of the event loop that follow."""
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        arrives = partial(tasks.start_soon, worker.answer, "honest", "small", 1)
        loop = asyncio.get_running_loop()
        tasks.start_soon(worker.answer, "hostile", "large", 20, lambda: loop.call_soon(arrives))

    assert ["large", "small", "large"] == worker.slices[:3]


async def test_a_cancelled_request_takes_nobody_s_turn() -> None:
    worker = Worker()
    async with anyio.create_task_group() as tasks:
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def cancelled(scope: anyio.CancelScope) -> None:
            with scope:
                await worker.answer("a", "cancelled", 1)

        for scope in scopes:
            tasks.start_soon(cancelled, scope)
        await anyio.lowlevel.checkpoint()
        for scope in scopes:
            scope.cancel()
        tasks.start_soon(worker.answer, "b", "kept", 1)

    assert ["kept"] == worker.slices == worker.done


async def test_one_slice_is_worked_in_each_round_of_the_event_loop() -> None:
    """Between two slices sockets are read, and other tasks go on."""
    worker, rounds = Worker(), 0

    async def others() -> None:
        nonlocal rounds
        while len(worker.done) < 4:
            rounds += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        for number in range(4):
            tasks.start_soon(worker.answer, f"{number}", f"{number}", 25)

    assert rounds >= 100


async def test_without_a_request_other_tasks_run() -> None:
    seen = []

    async def other() -> None:
        seen.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        await take_turn()
        ran = len(seen)

    assert 1 == ran
