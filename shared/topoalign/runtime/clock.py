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
        """Seconds since an arbitrary moment; they never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for this many seconds."""
        await asyncio.sleep(seconds)


def until_tick(clock: Clock, period: float) -> float:
    """
    The seconds until `clock.monotonic()` is the next multiple of `period`, in (0, `period`].

    Pollers with the same period then wake at the same moments: an idle process is woken a third as often. Example: at second
    12.3 there are 0.2 s until the next tick of 0.5 s, and 0.7 s until that of 1 s.
    """
    return period - clock.monotonic() % period


MOST_DOUBLINGS = 64
"""More doublings make no wait longer, and beyond 1,023 the power of two exceeds a float."""


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """
    Seconds to wait after this many failures in a row; after none as after one. The pause doubles with each failure.

    With `first` 0.2 s and `longest` 5 s the waits are 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5 ... seconds.
    """
    doublings = min(max(failures - 1, 0), MOST_DOUBLINGS)
    return min(longest, first * 2.0**doublings)
