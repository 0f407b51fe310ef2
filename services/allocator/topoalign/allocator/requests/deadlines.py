"""
Requests that come too late are refused.

A request can wait anywhere: in a socket buffer, at the NATS server, in this process while it is stopped. Its asker has given
up by then, and what is granted to it all the same is held for good. So a request names a deadline, on the clock of the
process that judges it: the asker reads this clock first (`ClockRequest`), and no clocks of two machines are compared.

    clock read: 100.0; the asker waits 10 s in all, 0.5 s of which are gone: deadline 109.5; at 131.0 it is refused

The clock is a new one with each start, so a request that was made to the process before is refused, too. A request without
a deadline is never late: earlier versions ask that way. docs/decisions/0009-deadlines.md has the reasons.
"""

from topoalign.core.model.errors import DeadlinePassed
from topoalign.core.model.requests import ClockReading, Deadline
from topoalign.core.ports import Clock


class Deadlines:
    """The clock of one process of an allocator, and the check of requests against it."""

    def __init__(self, clock: Clock, epoch: int) -> None:
        """`epoch`: that of the ledger since this start. With the time of the start it names the clock."""
        self._clock = clock
        self._name = f"{epoch:x}-{int(clock.monotonic() * 1_000_000):x}"
        self.missed = 0
        """Requests that came too late."""

    def reading(self) -> ClockReading:
        """The clock's name, and its time in seconds."""
        return ClockReading(clock=self._name, now=self._clock.monotonic())

    def check(self, deadline: Deadline | None, request: str) -> None:
        """Refuses a request after its deadline. `request` names it in the error. Raises DeadlinePassed."""
        if deadline is None:
            return
        now = self._clock.monotonic()
        if deadline.clock != self._name:
            self.missed += 1
            raise DeadlinePassed(request, "it was made before this allocator started")
        if now > deadline.at:
            self.missed += 1
            raise DeadlinePassed(request, f"it came {now - deadline.at:.1f} s after its deadline")
