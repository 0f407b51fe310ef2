"""
Finds the best partition of devices into sets of one size, which device policy `best-effort` maximises.

A partition is a split of some devices into as many sets of `size` as there can be, and what is left over as one smaller
set. It is worth the sum of the scores of all its sets, and the score of a set is the sum over its pairs (`Scores`). Of
the partitions in which a set of full size holds all required devices, the best are those worth the most; the chosen set
is the best that occurs in any of these and holds the required ones, of equals the one with the lowest indexes. So the
answer depends on the scores alone, and not on the order of the devices.

Up to 16 devices the search is exact (`exact`). With more, sets grow greedily and then exchange devices (`greedy`), and the
answer is marked as not exact (docs/decisions/0026-one-exact-and-one-greedy-partition-search.md).
"""

from collections.abc import Collection
from operator import itemgetter
from typing import NamedTuple

from topoalign.core.placement.gpus.seam import Scores, total_score
from topoalign.core.placement.partition.exact import MOST_EXACT, best_by_subsets
from topoalign.core.placement.partition.greedy import greedy_split


class Partition(NamedTuple):
    """The best partition that a search found, and its chosen set."""

    members: tuple[int, ...]
    """The chosen set: positions, ascending."""
    total: int
    """What the partition is worth that it belongs to."""
    exact: bool
    """Whether no partition is worth more, and no set is chosen before this one. False: greedy."""


def best_split(scores: Scores, available: Collection[int], required: Collection[int], size: int) -> Partition:
    """
    The chosen set of a best partition of the available positions, and what that partition is worth. Requires distinct
    positions of the table, all required ones available, and max(1, len(required)) <= size <= len(available).
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
