"""
Gives the event loop a turn in the middle of long work, so that no task blocks the others.

A task that always finds its next message there already never waits, and the loop runs nothing else meanwhile. A task that
answers a request goes on when the turn of that comes (`request_turns`).
"""

from topoalign.core.ports import Clock
from topoalign.runtime.request_turns import LONGEST_SECONDS, take_turn


class Turns:
    """The turns of one task, which calls `give` between two pieces of its work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()

    async def give(self) -> None:
        """Lets the other tasks run if this one has run for `LONGEST_SECONDS` since it let them last."""
        if self._clock.monotonic() < self._began + LONGEST_SECONDS:
            return
        if await take_turn():
            self._began = self._clock.monotonic()
