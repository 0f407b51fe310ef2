"""Goes through many rows in parts, with a turn of the event loop after each, so that no answer holds up the others."""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import anyio

T = TypeVar("T")

AT_ONCE = 32
"""Nodes that are looked at between two turns: some milliseconds of work where all of them have changed."""


async def in_turns(rows: Sequence[T], at_once: int = AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """The rows in parts of this length."""
    for start in range(0, len(rows), at_once):
        yield rows[start : start + at_once]
        await anyio.lowlevel.checkpoint()
