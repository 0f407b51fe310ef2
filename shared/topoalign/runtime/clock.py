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
