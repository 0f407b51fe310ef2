"""Bounds how often something is done: so many at once, and then so many in a while."""

from topoalign.core.ports import Clock


class Pace:
    """
    A token bucket of `most` tokens, which fills up within `seconds`.

    Example: 6 in 60 s allows six at once, and then one every ten seconds.
    """

    def __init__(self, clock: Clock, most: int, seconds: float) -> None:
        self._clock, self._most, self._each = clock, most, seconds / most
        self._full_at = clock.monotonic()
        """When all tokens will be there."""

    def take(self) -> bool:
        """Takes a token; False if there is none."""
        if self.wait() > 0:
            return False
        self._full_at = max(self._full_at, self._clock.monotonic()) + self._each
        return True

    def wait(self) -> float:
        """Seconds until there is a token."""
        missing = max(0.0, self._full_at - self._clock.monotonic())
        return max(0.0, missing - (self._most - 1) * self._each)
