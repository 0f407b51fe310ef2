"""
The one thread in which a driver makes its blocking calls, with a deadline for each of them.

A call into a driver library or a file of /sys may hang for ever, and a thread cannot be stopped from outside. So work
runs in a daemon thread, which does not keep the process from ending, and it reports each call before it makes it. If a
call takes too long, the caller gets an error with the name of the call and continues; the work ends at its next call.
Until then no other work begins, so a driver that hangs blocks one thread and never two. Work whose caller was cancelled ends
at its next call, too: later work waits for that, as long as the call is not late.

If the process was stopped, or got no CPU, a late call does not prove that it hangs: if the loop itself wakes late, the
deadline begins again.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from topoalign.core.model.errors import DriverFault
from topoalign.core.ports import Clock
from topoalign.runtime.tasks import background

T = TypeVar("T")

LATE_SECONDS = 1.0
"""Above what a loaded machine takes for a turn."""
MORE = "raise the limits of tasks and memory for this service"


class Abandoned(Exception):
    """Ends work whose result nobody waits for any more."""


class CallProgress:
    """Told by the work, before each call that may block, what is called."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.abandoned = False
        self.current = ("the first step", clock.monotonic())
        """The call under way and when it began. One tuple, because two threads share it."""

    def __call__(self, call: str) -> None:
        """Raises Abandoned once nobody waits for the work."""
        if self.abandoned:
            raise Abandoned
        self.current = (call, self._clock.monotonic())


class DriverThread:
    """Runs the blocking work of one driver, one piece at a time."""

    def __init__(self, driver: str, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds and holds for each call."""
        self._driver = driver
        self._clock = clock
        self._deadline = deadline
        self._under_way: tuple[CallProgress, Future[Any]] | None = None

    async def run(self, work: Callable[[CallProgress], T]) -> T:
        """The work's result. Raises what it raises, and DriverFault for a call that does not end, or without a thread."""
        while self._under_way is not None:
            await self._outlast(*self._under_way)
        steps = CallProgress(self._clock)
        result = Future[T]()
        self._under_way = steps, result
        result.set_running_or_notify_cancel()  # only the thread may end it now
        thread = threading.Thread(target=partial(self._do, work, steps, result), name=self._driver, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # raised by Python if the system cannot create a thread
            self._under_way = None
            raise DriverFault(f"{self._driver} cannot be asked: {error}", MORE) from error
        try:
            async with background() as tasks:
                tasks.start_soon(self._watch, steps, self._clock.monotonic())
                return await asyncio.wrap_future(result)
        except MemoryError as error:
            raise DriverFault(f"{self._driver} has no memory for {steps.current[0]}", MORE) from error
        finally:
            steps.abandoned = True

    def _do(self, work: Callable[[CallProgress], T], steps: CallProgress, result: "Future[T]") -> None:
        try:
            done = work(steps)
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            self._under_way = None
            result.set_exception(error)
        else:
            self._under_way = None
            result.set_result(done)

    async def _outlast(self, steps: CallProgress, result: "Future[Any]") -> None:
        """Waits until earlier work has ended, however it does. Raises DriverFault when a call of it takes too long."""
        async with background() as tasks:
            tasks.start_soon(self._watch, steps, steps.current[1])
            await asyncio.gather(asyncio.wrap_future(result), return_exceptions=True)

    async def _watch(self, steps: CallProgress, awake: float) -> None:
        """Raises DriverFault when a call takes too long. `awake`: since when the loop is known to run."""
        while True:
            _, since = steps.current
            due = max(since, awake) + self._deadline
            if due <= self._clock.monotonic():
                raise DriverFault(
                    f"{self._driver} has not answered {steps.current[0]} within {self._deadline:g} s",
                    "look for driver errors in the kernel log; a driver that hangs for long needs its node restarted",
                )
            await self._clock.sleep(due - self._clock.monotonic())
            if self._clock.monotonic() - due > LATE_SECONDS:
                awake = self._clock.monotonic()
