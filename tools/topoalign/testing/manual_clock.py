"""A clock that stands still until a test or a simulation advances it."""

from heapq import heappop, heappush
from itertools import count

import anyio

TURNS = 30
"""Of the event loop: more than one task needs that wakes another, which wakes a third, on a bus in memory."""


LOOK_SECONDS = 0.001
"""Real time in which a look whether all other tasks wait is over."""


class ManualClock:
    """Stands still until `advance` is called; who sleeps on it wakes in the order of the times they sleep to."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._order = count()

    def wall(self) -> float:
        """The time of this clock, in seconds."""
        return self._now

    def monotonic(self) -> float:
        """The same as `wall`."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was advanced by this many seconds."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        woken = anyio.Event()
        heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Lets this much time pass, waking sleepers one by one and giving each a turn before the next."""
        await all_tasks_blocked()
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, woken = heappop(self._sleepers)
            self._now = max(self._now, due)  # who was to wake while the process was stopped wakes late
            woken.set()
            await all_tasks_blocked()
        self._now = until


async def all_tasks_blocked() -> None:
    """
    Waits until every other task waits for something, as anyio's `wait_all_tasks_blocked` does.

    Alone, that sleeps for a tenth of a second whenever it finds a task that does not wait yet. After `TURNS` of the event
    loop there is most often none left. If there is, what it needs is more turns, and no time: they follow at once.
    """
    while True:
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(LOOK_SECONDS):
            await anyio.wait_all_tasks_blocked()
            return
