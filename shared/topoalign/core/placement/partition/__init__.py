"""
Finds the best partition of devices into sets of one size, which device policy `best-effort` maximises.

A partition is a split of some devices into as many sets of `size` as there can be, and what is left over as one smaller
set. It is worth the sum of the scores of all its sets, and the score of a set is the sum over its pairs (`Scores`). Of
the partitions in which a set of full size holds all required devices, the best are those worth the most; the chosen set
is the best that occurs in any of these and holds the required ones, of equals the one with the lowest indexes. So the
answer depends on the scores alone, and not on the order of the devices.

Four algorithms find it, each exact but the last:

- up to 9 devices: all partitions, listed beforehand (`tables`);
- hierarchical scores, any number of devices: what matters of each block is how many are left (`tree_partition`);
- up to 18 devices: bounds by prices, and then the few sets that are left (`lagrangian`);
- more, or where an exact search ends at its limit on work: sets that grow greedily and then exchange devices (`greedy`).
  Neither the chosen set nor the total is worth less than what grew greedily, and the answer is marked as not exact.

Nothing is remembered from one call to the next but lists that depend on the number of devices and the size only.
"""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.placement.gpus.seam import Scores, total_score
from topoalign.core.placement.partition.greedy import greedy_split
from topoalign.core.placement.partition.lagrangian import MOST_PRICED, best_by_prices
from topoalign.core.placement.partition.masks import mask_members, mask_of_members
from topoalign.core.placement.partition.search_budget import PartitionSearchBudget
from topoalign.core.placement.partition.tables import MOST_LISTED, best_by_table
from topoalign.core.placement.partition.tree_partition import MOST_IN_TREE, best_by_tree, build_score_tree

MOST_STEPS = 50_000
"""Of an exact search: 30 to 60 ms. A DGX-2 takes 2,000 at most, the 72 GPUs of an NVL72 10,000."""


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
    Finds the chosen set of a best partition of the available positions, and what that partition is worth.

    Requires what `placement.choose` checks: distinct positions of the table, all required ones available, and max(1,
    len(required)) <= size <= len(available).
    """
    free = sorted(available)
    if size == len(free):
        return Partition(tuple(free), total_score(scores, free), exact=True)
    if size == 1:
        return Partition(tuple(required) or (free[0],), 0, exact=True)
    local = among(scores, free)
    fixed = [free.index(position) for position in sorted(required)]
    try:
        mask, worth = exact_split(local, fixed, size)
    except TooMuchWork:
        members, worth = greedy_split(local, fixed, size)
        return Partition(tuple(free[member] for member in members), worth, exact=False)
    return Partition(tuple(free[member] for member in mask_members(mask, len(free))), worth, exact=True)


def exact_split(scores: Scores, required: Sequence[int], size: int) -> tuple[int, int]:
    """Finds the chosen set of all positions of the table, as a mask, and the total. Raises TooMuchWork."""
    devices = len(scores)
    fixed = mask_of_members(required, devices)
    if devices <= MOST_LISTED:
        return best_by_table(scores, fixed, size)
    work = PartitionSearchBudget(MOST_STEPS)
    tree = build_score_tree(scores, range(devices)) if devices <= MOST_IN_TREE else None
    if tree is not None:
        return best_by_tree(tree, devices, required, size, work)
    if devices > MOST_PRICED:
        work.give_up()
    return best_by_prices(scores, fixed, size, work)


def among(scores: Scores, positions: Sequence[int]) -> Scores:
    """The table of two or more positions: their rows and columns."""
    columns = itemgetter(*positions)
    return [columns(scores[position]) for position in positions]
