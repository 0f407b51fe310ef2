"""What an API server does wrong on demand: answers that are slow, lost, refused or never come."""

from collections import deque
from enum import StrEnum

import msgspec


class Harm(StrEnum):
    """What happens to a request."""

    DROP = "drop"
    """Nothing is done, and the connection is closed without an answer."""
    LOSE = "lose"
    """It is done, and the connection is closed without an answer."""
    REFUSE = "refuse"
    """Nothing is done, and the answer has the fault's status."""
    SLOW = "slow"
    """It is done and answered after the fault's seconds."""
    SILENT = "silent"
    """Nothing is done, and no answer comes while the client waits."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One request that goes wrong."""

    harm: Harm
    status: int = 503
    seconds: float = 0.0


class Faults:
    """The faults that are to come, by request: `POST binding`, `LIST pods`, `WATCH nodes`, `PATCH nodes`, `POST events`."""

    def __init__(self) -> None:
        self._coming: dict[str, deque[Fault]] = {}

    def add(self, request: str, harm: Harm, times: int = 1, *, status: int = 503, seconds: float = 0.0) -> None:
        """The next requests of this name go wrong, after those that shall already."""
        fault = Fault(harm=harm, status=status, seconds=seconds)
        self._coming.setdefault(request, deque()).extend([fault] * times)

    def take(self, request: str) -> Fault | None:
        """The fault of the request that comes now."""
        coming = self._coming.get(request)
        return coming.popleft() if coming else None
