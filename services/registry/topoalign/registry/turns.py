"""Goes through many rows with turns of the event loop in between, so that no long answer holds up the others."""

from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

import anyio

from topoalign.core.ports import Clock

T = TypeVar("T")

SLICE_SECONDS = 0.005
"""Work between two turns: a tenth of what nobody should wait for, because several answers may be under way."""


async def in_turns(rows: Iterable[T], clock: Clock) -> AsyncIterator[T]:
    """The rows one by one, with a turn of the loop whenever a slice of time has been spent on them."""
    until = clock.monotonic() + SLICE_SECONDS
    for row in rows:
        yield row
        if clock.monotonic() >= until:
            await anyio.lowlevel.checkpoint()
            until = clock.monotonic() + SLICE_SECONDS
