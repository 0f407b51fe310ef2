"""The clock of this machine."""

import asyncio
import time

from topoalign.core.ports import Clock


class SystemClock:
    """The clock of this machine."""

    def wall(self) -> float:
        """Seconds since 1970, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; they never decrease."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits for this many seconds."""
        await asyncio.sleep(seconds)


def until_tick(clock: Clock, period: float) -> float:
    """
    The seconds until `clock.monotonic()` is the next multiple of `period`, in (0, `period`].

    Pollers with the same period then wake at the same time, so an idle process wakes only a third as often. Example: at
    12.3 s, the next multiple of 0.5 s is in 0.2 s, and the next multiple of 1 s is in 0.7 s.
    """
    return period - clock.monotonic() % period


MOST_DOUBLINGS = 64
"""More doublings do not make any wait longer, and 2**1024 does not fit into a float."""


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """
    Seconds to wait after this many consecutive failures; 0 counts as 1. The pause doubles with each failure.

    With `first` 0.2 s and `longest` 5 s the waits are 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5 ... seconds.
    """
    doublings = min(max(failures - 1, 0), MOST_DOUBLINGS)
    return min(longest, first * 2.0**doublings)
