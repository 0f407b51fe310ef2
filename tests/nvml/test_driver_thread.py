"""The thread of a driver holds whatever hangs, and only that."""

import threading

import anyio
import pytest

from topoalign.core.errors import DriverFault
from topoalign.discovery.drivers.thread import DriverThread, Steps
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio


async def test_work_comes_back_with_its_result_or_its_error() -> None:
    thread = DriverThread("driver", ManualClock(), 1.0)

    assert 42 == await thread.run(lambda steps: 42)
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda steps: 1 // 0)
    assert 42 == await thread.run(lambda steps: 42)


async def test_the_deadline_holds_for_each_call_and_not_for_the_work() -> None:
    """Three calls of 0.9 s each are fine with a deadline of 1 s."""
    clock = ManualClock()
    begun = [threading.Event() for _ in range(3)]
    ended = [threading.Event() for _ in range(3)]

    def work(steps: Steps) -> str:
        for i in range(3):
            steps(f"call {i}")
            begun[i].set()
            ended[i].wait()
        return "done"

    async def pass_time() -> None:
        for start, end in zip(begun, ended, strict=True):
            await happened(start)
            await clock.advance(0.9)
            end.set()

    async with background() as tasks:
        tasks.start_soon(pass_time)
        assert "done" == await DriverThread("driver", clock, 1.0).run(work)


async def test_work_that_nobody_waits_for_ends_at_its_next_call() -> None:
    """Also when it is the reader who was cancelled, as at the end of the service."""
    thread = DriverThread("driver", ManualClock(), 1.0)
    begun, go_on, after = threading.Event(), threading.Event(), []

    def work(steps: Steps) -> None:
        steps("first")
        begun.set()
        go_on.wait()
        steps("second")
        after.append("second")

    async with background() as tasks:
        tasks.start_soon(thread.run, work)
        await happened(begun)
    with pytest.raises(DriverFault, match="first"):
        await thread.run(work)

    go_on.set()
    while True:
        try:
            assert "free" == await thread.run(lambda steps: "free")
            break
        except DriverFault:
            await anyio.lowlevel.checkpoint()
    assert [] == after


async def happened(event: threading.Event) -> None:
    while not event.is_set():
        await anyio.lowlevel.checkpoint()
