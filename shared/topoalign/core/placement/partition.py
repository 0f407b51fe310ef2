"""
Finds the best partition of devices into sets of one size, which device policy `best-effort` maximises.

A partition splits devices into as many sets of `size` as possible. The remaining devices form one smaller set. The
value of a partition is the sum of the scores of its sets. The score of a set is the sum over its pairs (`Scores`). Only
partitions in which a set of full size has all required devices count. The chosen set is the best set with the required
devices in any partition of the highest value. Of equal sets, it is the one with the lowest indexes. So the answer
depends only on the scores, and not on the order of the devices.

For up to 16 devices, the search is exact. For more, sets grow greedily and then exchange devices, and the answer is
marked as not exact (docs/decisions/0026-one-exact-and-one-greedy-partition-search.md).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import combinations
from operator import add, itemgetter
from typing import NamedTuple

from topoalign.core.placement.gpus.bandwidth import Scores, grow_set, total_score


class Partition(NamedTuple):
    """The best partition that a search found, and its chosen set."""

    members: tuple[int, ...]
    """The chosen set: positions, ascending."""
    total: int
    """The value of the partition that contains the set."""
    exact: bool
    """Whether the search was exact: no partition has a higher value, and no set is better. False: greedy."""


def best_split(scores: Scores, available: Collection[int], required: Collection[int], size: int) -> Partition:
    """
    The chosen set of a best partition of the available positions, and its value. Requires distinct positions of the
    table, of which all required ones are available, and max(1, len(required)) <= size <= len(available).
    """
    free = sorted(available)
    if size == len(free):
        return Partition(tuple(free), total_score(scores, free), exact=True)
    if size == 1:
        return Partition(tuple(required) or (free[0],), 0, exact=True)
    among_free = itemgetter(*free)
    rows = [among_free(row) for row in among_free(scores)]
    fixed = [free.index(position) for position in sorted(required)]
    exact = len(free) <= MOST_EXACT
    members, total = (best_by_subsets if exact else greedy_split)(rows, fixed, size)
    return Partition(tuple(free[member] for member in members), total, exact)


# The exact search: a table with the best partition of each subset that can remain.
#
# A set of devices is a mask in which the first device has the highest bit, so of two sets of one size the one with the
# lower indexes has the greater mask. The device with the lowest bit of a subset is in one of its sets: in one of full
# size, or in the smaller one. So the best partition of the subset is one of these sets, together with the best
# partition of the remaining devices.


MOST_EXACT = 16
"""
Maximum number of devices for the exact search. Sixteen take 10 ms to 0.3 s, depending on the size. Each further device
doubles the number of subsets.
"""


def best_by_subsets(scores: Scores, required: Sequence[int], size: int) -> tuple[Sequence[int], int]:
    """Finds the chosen set, ascending, and the total; 1 < size < devices <= MOST_EXACT."""
    devices = len(scores)
    everything = (1 << devices) - 1
    worth = _score_subsets(scores)

    @cache
    def total_of(subset: int) -> int:
        """The value of a best partition of the subset."""
        count = subset.bit_count()
        if count <= size:
            return worth[subset]
        lowest, *others = _bits_of(subset)
        left_over = count % size
        sizes = (size, left_over) if left_over else (size,)
        sets = [lowest + rest for each in sizes for rest in map(sum, combinations(others, each - 1))]
        total_of_rest: Callable[[int], int] = worth.__getitem__ if count <= 2 * size else total_of
        best: int = max(map(add, map(worth.__getitem__, sets), map(total_of_rest, map(subset.__xor__, sets))))
        return best

    def total_with(mask: int) -> int:
        """The value of the best partition that has this set."""
        return worth[mask] + total_of(everything ^ mask)

    fixed = sum(1 << devices - 1 - member for member in required)
    others = combinations(_bits_of(everything ^ fixed), size - len(required))
    sets = [fixed + mask for mask in map(sum, others)]
    total = max(map(total_with, sets)) if required else total_of(everything)
    sets.sort(key=lambda mask: (worth[mask], mask), reverse=True)
    chosen = next(mask for mask in sets if total_with(mask) == total)
    # `total_of` refers to itself, so its tables (some MiB) would stay until the next run of the garbage collector.
    total_of.cache_clear()
    worth.clear()
    return [member for member in range(devices) if chosen >> devices - 1 - member & 1], total


def _bits_of(subset: int) -> list[int]:
    return [1 << place for place in range(subset.bit_length()) if subset >> place & 1]


def _score_subsets(scores: Scores) -> list[int]:
    """Mask -> the score of the set, as a list. Each device adds its links to devices that are already in the set."""
    worth = [0]
    for position in reversed(range(len(scores))):
        gains = [0]
        for value in scores[position][:position:-1]:
            gains += [value + smaller for smaller in gains]
        worth += map(add, worth, gains)
    return worth


# The greedy search. A set grows from each possible start, by the device that adds most to its score. The best of these
# sets is kept, and the next set grows from the remaining devices. Then two devices of different sets are exchanged as
# long as this increases the total.


MOST_LOOKS = 40_000
"""
Maximum number of pairs that are examined for an exchange: 20 ms. Sixty-four devices have 2,016 pairs, and a dozen
rounds find nearly all improvements.
"""

Sets = list[list[int]]
"""Positions, ascending. The sets of full size are in the order in which they grew; a smaller set is the last."""


def greedy_split(scores: Scores, required: Sequence[int], size: int) -> tuple[Sequence[int], int]:
    """A good set that has all required positions, and the value of the partition of the table that contains it."""
    sets = _exchange_devices(scores, _grow_partition(scores, required, size), required)
    holding = [members for members in sets if len(members) == size and {*required} <= {*members}]
    return _best_set(scores, holding), sum(total_score(scores, members) for members in sets)


def _grow_partition(scores: Scores, required: Sequence[int], size: int) -> Sets:
    """Splits all positions into sets that grow one after the other. The first grows from the required positions."""
    rest = list(range(len(scores)))
    indifferent = [0] * len(scores)
    sets: Sets = []
    while len(rest) > size:
        seeds = [list(required)] if required and not sets else [[start] for start in rest]
        best = _best_set(scores, ([*grow_set(scores, rest, seed, size, indifferent)] for seed in seeds))
        sets.append(best)
        rest = [position for position in rest if position not in best]
    return [*sets, rest] if rest else sets


def _best_set(scores: Scores, sets: Iterable[list[int]]) -> list[int]:
    """The set with the highest score. Of equal sets, the one with the lowest indexes."""
    return min(sets, key=lambda members: (-total_score(scores, members), members))


def _exchange_devices(scores: Scores, sets: Sets, fixed: Collection[int]) -> Sets:
    """Exchanges two devices of different sets as long as this increases the total. The `fixed` ones stay."""
    home = {device: at for at, members in enumerate(sets) for device in members}
    links = [[sum(row[member] for member in members) for members in sets] for row in scores]
    movable = [device for device in sorted(home) if device not in fixed]
    looks = 0
    improving = True
    while improving and looks < MOST_LOOKS:
        improving = False
        for a, b in combinations(movable, 2):
            looks += 1
            ours = home[a]
            theirs = home[b]
            if ours == theirs:
                continue
            our_gain = links[b][ours] - links[a][ours] - scores[a][b]
            their_gain = links[a][theirs] - links[b][theirs] - scores[a][b]
            # the score of the first set, which grew from all devices, must not decrease
            first_gain = our_gain if ours == 0 else their_gain if theirs == 0 else 0
            if our_gain + their_gain > 0 and first_gain >= 0:
                improving = True
                home[a] = theirs
                home[b] = ours
                for row, linked in zip(scores, links, strict=True):
                    linked[ours] += row[b] - row[a]
                    linked[theirs] += row[a] - row[b]
    return [[device for device in sorted(home) if home[device] == at] for at in range(len(sets))]
