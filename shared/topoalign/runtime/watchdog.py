"""
Watches the event loop: measures its delay, and checks that it is alive.

All parts of a process share one event loop. A blocking call (a driver that hangs in the wrong place, a machine that
swaps) blocks the kubelet's calls, the bus and HTTP at the same time, and from outside it looks like a slow network. The
watchdog sleeps for a second at a time and measures how much longer the sleep took.
"""

import structlog

from topoalign.core.ports import Clock
from topoalign.runtime.clock import until_tick
from topoalign.runtime.metrics import ServiceMetric

PERIOD_SECONDS = 1.0
LATE_SECONDS = 1.0
"""Longer than an iteration of the loop takes on a loaded machine, and shorter than a kubelet waits for any response."""
STUCK_SECONDS = 5.0
"""If the loop is this late, /livez fails, and the liveness probe can restart the process."""

log = structlog.get_logger("topoalign.runtime.watchdog")


class Watchdog:
    """Measures how late an event loop is. `run` it on the loop that is watched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: float | None = None
        """Monotonic seconds at which the loop should wake next; None before the first sleep."""
        self.lag = 0.0
        """Seconds by which the loop last woke late."""
        self.blocks = 0
        """Number of times that it was late by more than `LATE_SECONDS`."""

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            wait = until_tick(self._clock, PERIOD_SECONDS)
            self._due = self._clock.monotonic() + wait
            await self._clock.sleep(wait)
            self.note(self.overdue)

    @property
    def overdue(self) -> float:
        """Seconds by which the loop is late at this moment."""
        return max(0.0, self._clock.monotonic() - self._due) if self._due is not None else 0.0

    def note(self, lag: float) -> None:
        """Records how many seconds late the loop woke, and logs a long delay."""
        self.lag = lag
        if lag > LATE_SECONDS:
            self.blocks += 1
            log.warning(
                "event loop blocked",
                seconds=round(lag, 3),
                remedy="see what the process did: its log, the CPU and memory it gets, disks and drivers that hang",
            )

    def reason_not_alive(self) -> str | None:
        """The check for /livez: why the process needs a restart; None: it needs none."""
        late = max(self.overdue, self.lag)
        return f"the event loop is {late:.1f} s late" if late >= STUCK_SECONDS else None

    def metrics(self) -> list[ServiceMetric]:
        """The lag and the number of delays, for /metrics."""
        return [
            ServiceMetric(
                "gauge",
                "topoalign_event_loop_lag_seconds",
                "Delay of the event loop.",
                lambda: max(self.overdue, self.lag),
            ),
            ServiceMetric(
                "counter",
                "topoalign_event_loop_blocks",
                f"Times that the event loop was more than {LATE_SECONDS:g} s late.",
                lambda: self.blocks,
            ),
        ]
