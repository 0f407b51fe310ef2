"""
Tells whether this process was late itself while it waited for an answer.

While the event loop stands still, answers stay unread, and afterwards the time-outs of all questions fire before the first
answer is read. So a time-out tells something about the other side only if the loop went on meanwhile. This is measured
with a task that sleeps for a short time again and again, and notes when it wakes late.
"""

from math import inf

from topoalign.core.ports import Clock


class Lateness:
    """When the event loop was late last. `run` it while questions are under way."""

    def __init__(self, clock: Clock, bearable: float) -> None:
        """`bearable`: seconds. The loop was late if it stood still for twice as long; less may go unnoticed."""
        self._clock = clock
        self._bearable = bearable
        self._due = inf
        """Monotonic seconds at which the task is to wake next."""
        self._noticed = -inf
        """Monotonic seconds at which it last woke late."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._due = self._clock.monotonic() + self._bearable
            await self._clock.sleep(self._bearable)
            if self._is_overdue():
                self._noticed = self._clock.monotonic()

    def was_late_since(self, moment: float) -> bool:
        """Whether the loop was late at this time (monotonic seconds) or after it."""
        return self._is_overdue() or self._noticed >= moment

    def _is_overdue(self) -> bool:
        return self._clock.monotonic() > self._due + self._bearable
