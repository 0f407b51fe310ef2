"""
Runs a driver's blocking calls in a single thread, with a deadline for each call.

A call of a driver library or an access to a file in /sys can hang forever, and a thread cannot be stopped from outside.
So the work runs in a daemon thread, which does not prevent the process from ending, and it reports each call before it
makes it. If a call takes too long, the caller gets an error with the name of the call and continues; the work ends at
its next call. Until then, no other work begins, so a driver that hangs blocks only one thread. If a caller is
cancelled, its work also ends at its next call. Later work waits for that, unless the call exceeds its deadline.

If the process was paused or got no CPU time, a late call does not prove that the driver hangs. So if the event loop
itself wakes late, the deadline starts again.
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
"""Longer than an iteration of the event loop takes on a loaded machine."""
MORE = "raise the limits of tasks and memory for this service"


class Abandoned(Exception):
    """Ends work whose result nobody waits for any more."""


class CallProgress:
    """Records the call that the work makes. The work calls this object before each call that can block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.abandoned = False
        self.current = ("the first step", clock.monotonic())
        """The call in progress and when it began. One tuple, because two threads share it."""

    def __call__(self, call: str) -> None:
        """Records the next call. Raises Abandoned if nobody waits for the work any more."""
        if self.abandoned:
            raise Abandoned
        self.current = (call, self._clock.monotonic())


class DriverThread:
    """Runs the blocking work of one driver, one piece at a time."""

    def __init__(self, driver: str, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds and applies to each call."""
        self._driver = driver
        self._clock = clock
        self._deadline = deadline
        self._under_way: tuple[CallProgress, Future[Any]] | None = None

    async def run(self, work: Callable[[CallProgress], T]) -> T:
        """Returns the result of the work. Raises its errors, and DriverFault if a call hangs or no thread starts."""
        while self._under_way is not None:
            steps, earlier = self._under_way
            async with background() as tasks:  # earlier work ends first, even if it fails
                tasks.start_soon(self._watch, steps, steps.current[1])
                await asyncio.gather(asyncio.wrap_future(earlier), return_exceptions=True)
        steps = CallProgress(self._clock)
        result = Future[T]()
        self._under_way = steps, result
        result.set_running_or_notify_cancel()  # from now on, only the thread may complete it
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
        except BaseException as error:  # the caller receives every error
            self._under_way = None
            result.set_exception(error)
        else:
            self._under_way = None
            result.set_result(done)

    async def _watch(self, steps: CallProgress, awake: float) -> None:
        """Raises DriverFault when a call takes too long. `awake`: time since which the event loop is known to run."""
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
