"""
Finds the best partition of up to 16 devices, from a table with the best partition of each subset that can be left.

A set of devices is a mask in which the first device has the highest bit. So of two sets of one size the one with the lower
indexes has the greater mask: it comes first where both are equally good.

The device with the lowest bit of a subset is in one of its sets: in one of full size, or in the smaller one of what is left
over. So the best partition of the subset is the best of these sets with the best partition of the rest.
"""

from collections.abc import Sequence
from itertools import combinations
from operator import add

from topoalign.core.placement.gpus.seam import Scores

MOST_EXACT = 16
"""Devices. Sixteen take 10 ms to 0.3 s, depending on the size; each more doubles the number of subsets."""


class SubsetPartitions:
    """The best partitions of subsets of some devices into sets of one size and what is left over."""

    def __init__(self, scores: Scores, size: int) -> None:
        self.worth = _score_subsets(scores)
        """Mask -> the score of the set."""
        self._size = size
        self._totals: dict[int, int] = {}

    def total(self, subset: int) -> int:
        """What a best partition of the subset is worth."""
        devices = subset.bit_count()
        if devices <= self._size:
            return self.worth[subset]
        if subset not in self._totals:
            sets = self._first_sets(subset)
            total_of_rest = self.worth.__getitem__ if devices <= 2 * self._size else self.total
            totals = map(add, map(self.worth.__getitem__, sets), map(total_of_rest, map(subset.__xor__, sets)))
            self._totals[subset] = max(totals)
        return self._totals[subset]

    def total_with(self, mask: int, subset: int) -> int:
        """What the best partition of the subset is worth that has this set."""
        return self.worth[mask] + self.total(subset ^ mask)

    def _first_sets(self, subset: int) -> list[int]:
        """The sets that can have the device with the lowest bit, where the subset has more devices than one set."""
        lowest, *others = _bits_of(subset)
        left_over = subset.bit_count() % self._size
        sizes = (self._size, left_over) if left_over else (self._size,)
        return [lowest + rest for size in sizes for rest in map(sum, combinations(others, size - 1))]


def best_by_subsets(scores: Scores, required: Sequence[int], size: int) -> tuple[Sequence[int], int]:
    """Finds the chosen set, ascending, and the total; 1 < size < devices <= MOST_EXACT."""
    devices = len(scores)
    everything = (1 << devices) - 1
    fixed = sum(1 << devices - 1 - member for member in required)
    partitions = SubsetPartitions(scores, size)
    others = combinations(_bits_of(everything ^ fixed), size - len(required))
    sets = [fixed + mask for mask in map(sum, others)]
    holding = (partitions.total_with(mask, everything) for mask in sets)
    total = max(holding) if required else partitions.total(everything)
    sets.sort(key=lambda mask: (partitions.worth[mask], mask), reverse=True)
    chosen = next(mask for mask in sets if partitions.total_with(mask, everything) == total)
    return [member for member in range(devices) if chosen >> devices - 1 - member & 1], total


def _bits_of(subset: int) -> list[int]:
    return [1 << place for place in range(subset.bit_length()) if subset >> place & 1]


def _score_subsets(scores: Scores) -> list[int]:
    """Mask -> the score of the set, as a list. A device adds its links to the devices that are there."""
    worth = [0]
    for position in reversed(range(len(scores))):
        gains = [0]
        for value in scores[position][:position:-1]:
            gains += [value + smaller for smaller in gains]
        worth += map(add, worth, gains)
    return worth
