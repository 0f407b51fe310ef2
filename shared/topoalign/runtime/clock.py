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

    Whoever polls waits for so long between two polls: those with the same period, or one that divides it, then wake at the
    same moments. A process that does little is woken a third as often, and each time it is woken costs more than the poll.
    Example: at second 12.3 there are 0.2 s until the next tick of 0.5 s, and 0.7 s until that of 1 s, which is one of both.
    """
    return period - clock.monotonic() % period


MOST_DOUBLINGS = 64
"""More doublings make no wait longer, and beyond 1,023 the power of two exceeds a float."""


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """
    Seconds to wait after this many failures in a row; after none as after one. The pause doubles with each failure.

    `first` and `longest` are in seconds; `longest` bounds every wait, also the first. With a first pause of 0.2 s and a
    longest of 5 s the waits are 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5 ... seconds. The caller counts its failures and sleeps on its
    own clock. A caller that spreads its tries, so that many nodes do not try at the same moment, multiplies the seconds by a
    random factor of its own.
    """
    doublings = min(max(failures - 1, 0), MOST_DOUBLINGS)
    return min(longest, first * 2.0**doublings)
