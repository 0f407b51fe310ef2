"""
The epoch of discovery's messages.

A subscriber drops a message whose revision is not greater than the newest one of the same epoch. So a forged reading
with a large revision would make everybody ignore discovery until the epoch ends. Therefore discovery begins a new epoch
when another client has published for its node or a subscriber requests everything again. It begins at most one every
few seconds, because each is recorded on disk and forged messages may come in any number.
"""

from collections.abc import Callable

from topoalign.core.ports import Clock

RENEW_SECONDS = 5.0
"""Between two epochs of one run. Below the ten seconds after which a registry and an allocator ask again."""


class Epochs:
    """Numbers the epochs of one run."""

    def __init__(self, begin: Callable[[], int], clock: Clock) -> None:
        """`begin` gives a number above those of earlier runs, as far as they are on record."""
        self._begin = begin
        self._clock = clock
        self.current = begin()
        self._since = clock.monotonic()

    def renew(self) -> bool:
        """Begins a new epoch, unless one has just begun. Returns whether it did."""
        if self._clock.monotonic() < self._since + RENEW_SECONDS:
            return False
        self.current = max(self._begin(), self.current + 1)
        self._since = self._clock.monotonic()
        return True
