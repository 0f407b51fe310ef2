"""How thoroughly faults are caused: a sample in `make test`, every step and every seed in `make test-faults`."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("TOPOALIGN_FAULTS") == "all"


def sample(items: Sequence[T], few: int) -> Sequence[T]:
    """All of them in a thorough run; else about so many, spread evenly, the first and the last among them."""
    if THOROUGH or len(items) <= few:
        return items
    return [items[round(place * (len(items) - 1) / (few - 1))] for place in range(few)]
