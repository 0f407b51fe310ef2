"""The loop of the simulation: time that flies, an order that is drawn, processes that die and stop."""

import time

import anyio
import pytest
import structlog
from simulation.loop import Process, SimulatedLoop, Stalled, simulate
from simulation.scenario import run


async def crowd(loop: SimulatedLoop) -> list[tuple[int, float]]:
    """Five tasks that take turns."""
    turns: list[tuple[int, float]] = []

    async def take(number: int) -> None:
        for _ in range(3):
            await anyio.sleep(number % 2 * 3600)
            turns.append((number, loop.time()))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(take, number)
    return turns


def test_hours_pass_at_once_and_timers_come_in_their_order() -> None:
    turns = simulate(1, crowd)

    assert 3 * 3600 == turns[-1][1]
    assert sorted(at for _, at in turns) == [at for _, at in turns]


def test_the_order_is_the_seeds_and_every_order_comes() -> None:
    runs = [tuple(simulate(seed, crowd)) for seed in range(50)]

    assert runs == [tuple(simulate(seed, crowd)) for seed in range(50)]
    assert len(set(runs)) > 40


def test_nobody_may_start_a_thread() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await anyio.to_thread.run_sync(time.time)

    with pytest.raises(RuntimeError, match="a thread"):
        simulate(1, main)


def test_a_run_in_which_everybody_waits_for_ever_is_ended() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await anyio.Event().wait()

    with pytest.raises(Stalled):
        simulate(1, main)


async def ticking(loop: SimulatedLoop, seen: list[float]) -> None:
    while True:
        await anyio.sleep(1)
        seen.append(loop.time())


def test_a_killed_process_does_nothing_more_and_its_connections_break() -> None:
    seen: list[float] = []
    broken: list[float] = []

    async def main(loop: SimulatedLoop) -> None:
        process = Process("p")
        process.ended.append(lambda: broken.append(loop.time()))
        loop.start(process, lambda: ticking(loop, seen))
        await anyio.sleep(2.5)
        loop.kill(process)
        await anyio.sleep(10)

    simulate(1, main)

    assert [1, 2] == seen
    assert [2.5] == broken


def test_a_stopped_process_continues_and_overdue_timers_fire_at_once() -> None:
    """A stopped process goes on where it was, and what was due meanwhile is due at once."""
    seen: list[float] = []
    others: list[float] = []

    async def main(loop: SimulatedLoop) -> None:
        process, other = Process("p"), Process("q")
        loop.start(process, lambda: ticking(loop, seen))
        loop.start(other, lambda: ticking(loop, others))
        await anyio.sleep(1.5)
        loop.pause(process)
        await anyio.sleep(60)
        loop.carry_on(process)
        await anyio.sleep(1.2)

    simulate(1, main)

    assert [1, 61.5, 62.5] == seen
    assert list(range(1, 63)) == others


def test_a_run_leaves_the_log_as_it_was_for_the_tests_after_it() -> None:
    before = structlog.get_config()
    run(1)

    assert before == structlog.get_config()
