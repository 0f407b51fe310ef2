"""
Converts sets of devices to masks and back.

The first device has the highest bit. So of two masks with equally many bits the greater one is the set with the lower
indexes: what comes first where two sets are equally good.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from operator import add

from topoalign.core.placement.gpus.seam import Scores


def mask_of_members(members: Iterable[int], devices: int) -> int:
    """The mask of these positions among so many devices."""
    return sum(1 << devices - 1 - member for member in members)


def mask_members(mask: int, devices: int) -> tuple[int, ...]:
    """The positions of a mask, ascending."""
    return tuple(member for member in range(devices) if mask >> devices - 1 - member & 1)


@cache
def masks_of_size(devices: int, size: int) -> tuple[int, ...]:
    """The masks of all sets of this size, the lowest indexes first."""
    bits = [1 << bit for bit in reversed(range(devices))]
    return tuple(map(sum, combinations(bits, size)))


def set_scores(scores: Scores) -> list[int]:
    """Mask -> the score of the set, as a list. A device adds its links to the devices that are there."""
    worth = [0]
    for position in reversed(range(len(scores))):
        gains = sums_by_mask(scores[position][:position:-1])
        worth = [*worth, *map(add, worth, gains)]
    return worth


def sums_by_mask(values: Iterable[int]) -> list[int]:
    """The sum of every set of these values, by its mask; the first value has the lowest bit."""
    sums = [0]
    for value in values:
        sums += [value + smaller for smaller in sums]
    return sums


def by_preference(worth: Sequence[int], masks: Iterable[int]) -> int:
    """The mask with the highest score of masks of one size; of equals the one with the lowest indexes."""
    return max(masks, key=lambda mask: (worth[mask], mask))
