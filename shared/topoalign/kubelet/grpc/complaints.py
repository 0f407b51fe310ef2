"""
Logs errors of peers, once per cause.

A flood is one event, not a hundred thousand. So the first error of a kind is logged at once, the following ones are
counted, and one line a minute reports their number, as long as there are any.
"""

from asyncio import TimerHandle, get_running_loop
from collections import Counter
from typing import Any

import structlog

AGAIN_SECONDS = 60.0
MOST_CAUSES = 64
"""That are told apart at a time."""

log = structlog.get_logger()


class Complaints:
    """Of one socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._counted: Counter[tuple[str, str]] = Counter()
        """Times that nothing was logged, by event and reason: of the causes that are not to be logged anew for a while."""
        self._timer: TimerHandle | None = None

    def say(self, event: str, reason: str, **details: Any) -> bool:
        """Logs this, or counts it if the same was logged a short while ago. Returns whether it was logged."""
        cause = (event, reason)
        if cause in self._counted:
            self._counted[cause] += 1
            return False
        if len(self._counted) >= MOST_CAUSES:
            return False
        self._counted[cause] = 0
        log.warning(event, reason=reason, socket=self._socket, **details)
        if self._timer is None:
            self._timer = get_running_loop().call_later(AGAIN_SECONDS, self.sum_up)
        return True

    def sum_up(self) -> None:
        """Logs the counts. A cause of which nothing was counted is forgotten."""
        for (event, reason), times in self._counted.items():
            if times:
                log.warning(event, reason=reason, socket=self._socket, times=times, seconds=AGAIN_SECONDS)
        self._counted = Counter({cause: 0 for cause, times in self._counted.items() if times})
        self._timer = get_running_loop().call_later(AGAIN_SECONDS, self.sum_up) if self._counted else None

    def end(self) -> None:
        """The socket is closed: what was counted is logged."""
        if self._timer is not None:
            self._timer.cancel()
            self.sum_up()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
