"""The thread of a driver holds whatever hangs, and only that."""

import threading

import anyio
import pytest
from device_allocations_support import ShiftingClock

from topoalign.core.model.errors import DriverFault
from topoalign.runtime.driver_thread import CallProgress, DriverThread
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

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

    def work(steps: CallProgress) -> str:
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
    """Also when it is the reader who was cancelled, as at the end of the service. Who comes meanwhile waits for it."""
    thread = DriverThread("driver", ManualClock(), 1.0)
    begun, go_on, after, found = threading.Event(), threading.Event(), list[str](), list[str]()

    def work(steps: CallProgress) -> None:
        steps("first")
        begun.set()
        go_on.wait()
        steps("second")
        after.append("second")

    async def come(name: str) -> None:
        found.append(await thread.run(lambda steps: name))

    async with background() as tasks:
        tasks.start_soon(thread.run, work)
        await happened(begun)
    async with anyio.create_task_group() as comers:
        comers.start_soon(come, "one")
        comers.start_soon(come, "two")
        await all_tasks_blocked()
        assert [] == found
        go_on.set()

    assert (["one", "two"], []) == (sorted(found), after)


async def test_of_those_who_wait_for_earlier_work_one_begins_at_its_end() -> None:
    thread = DriverThread("driver", ManualClock(), 1.0)
    begun: list[int] = []
    gate = threading.Semaphore(0)

    def work(steps: CallProgress) -> None:
        begun.append(len(begun))
        gate.acquire()

    async with anyio.create_task_group() as comers:
        for _ in range(3):
            comers.start_soon(thread.run, work)
        for count in (1, 2, 3):
            while len(begun) < count:
                await anyio.lowlevel.checkpoint()
            await all_tasks_blocked()
            assert count == len(begun)
            gate.release()


async def test_work_that_nobody_waits_for_has_as_long_as_any_other() -> None:
    clock = ManualClock()
    thread = DriverThread("driver", clock, 1.0)
    begun, go_on = threading.Event(), threading.Event()

    def work(steps: CallProgress) -> None:
        steps("first")
        begun.set()
        go_on.wait()

    async def come() -> None:
        with pytest.raises(DriverFault, match="first within 1 s"):
            await thread.run(work)

    async with background() as tasks:
        tasks.start_soon(thread.run, work)
        await happened(begun)
        await clock.advance(0.9)
    async with anyio.create_task_group() as comers:
        comers.start_soon(come)
        await clock.advance(0.1)
    with pytest.raises(DriverFault, match="first within 1 s"):
        await thread.run(work)
    go_on.set()


async def test_a_process_that_was_stopped_gives_the_call_its_time_anew() -> None:
    """For a minute neither the call nor the loop could go on; a call that hangs afterwards is one that hangs."""
    clock = ShiftingClock()
    thread = DriverThread("driver", clock, 10.0)
    begun, go_on = threading.Event(), threading.Event()

    def work(steps: CallProgress) -> str:
        steps("call")
        begun.set()
        go_on.wait()
        return "done"

    async def stopped() -> None:
        await happened(begun)
        await clock.advance(1.0)
        clock.stop(60.0)
        await clock.advance(9.0)
        go_on.set()

    async with background() as tasks:
        tasks.start_soon(stopped)
        assert "done" == await thread.run(work)

    begun.clear()
    go_on.clear()

    async def stopped_and_hanging() -> None:
        await happened(begun)
        clock.stop(60.0)
        await clock.advance(10.0)
        await clock.advance(10.0)

    async with background() as tasks:
        tasks.start_soon(stopped_and_hanging)
        with pytest.raises(DriverFault, match="call within 10 s"):
            await thread.run(work)
    go_on.set()


async def test_a_system_without_threads_is_a_fault_for_as_long_as_it_has_none() -> None:
    """The kernel refuses a thread whose stack no address space can hold, as it does at a limit of tasks."""
    thread = DriverThread("driver", ManualClock(), 1.0)
    usual = threading.stack_size(1 << 60)
    try:
        with pytest.raises(DriverFault, match="can't start new thread"):
            await thread.run(lambda steps: 42)
    finally:
        threading.stack_size(usual)

    assert 42 == await thread.run(lambda steps: 42)


async def test_a_reading_without_memory_is_a_fault_and_the_service_goes_on() -> None:
    """A reading that runs out of memory is a fault, and the service continues."""
    thread = DriverThread("driver", ManualClock(), 1.0)

    def work(steps: CallProgress) -> bytearray:
        steps("a large answer")
        return bytearray(1 << 62)

    with pytest.raises(DriverFault, match="no memory for a large answer"):
        await thread.run(work)
    assert 42 == await thread.run(lambda steps: 42)


async def happened(event: threading.Event) -> None:
    while not event.is_set():
        await anyio.lowlevel.checkpoint()
