"""Goes through many rows with turns of the event loop in between, so that no long answer holds up the others."""

from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from topoalign.core.ports import Clock
from topoalign.runtime.turns import Turns

T = TypeVar("T")


async def in_turns(rows: Iterable[T], clock: Clock) -> AsyncIterator[T]:
    """The rows one by one, with a turn of the loop whenever one has lasted long."""
    turns = Turns(clock)
    for row in rows:
        yield row
        await turns.give()
