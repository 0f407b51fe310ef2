"""
Finds the best partition of a few devices by comparing every partition, listed beforehand.

Which partitions there are depends on the number of devices and the size only. They are kept as columns: column i holds the
i-th set of each partition. A call looks up the scores of a whole column at once and adds the columns up, so that no loop
over partitions runs in Python. Nine devices have 945 partitions at most.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from operator import add, itemgetter
from typing import NamedTuple

from topoalign.core.placement.gpus.seam import Scores
from topoalign.core.placement.partition.masks import by_preference, mask_of_members, masks_of_size, set_scores

MOST_LISTED = 9
"""Devices. Ten would have 2,800 partitions: a millisecond for each request."""

Column = Callable[[Sequence[int]], tuple[int, ...]]


class Table(NamedTuple):
    """Every partition of some devices into sets of one size and what is left over."""

    rows: tuple[tuple[int, ...], ...]
    """The full sets of each partition, as masks."""
    columns: tuple[Column, ...]
    """Look up the scores of the first sets, of the second ones, …, and of what is left over, in a list by mask."""


def best_by_table(scores: Scores, required: int, size: int) -> tuple[int, int]:
    """Finds the chosen set, as a mask, and the total. `required` is a mask, too; 1 < size < devices <= MOST_LISTED."""
    table = list_partitions(len(scores), size)
    worth = set_scores(scores)
    totals: Sequence[int] = table.columns[0](worth)
    for column in table.columns[1:]:
        totals = list(map(add, totals, column(worth)))
    partitions = list(zip(totals, table.rows, strict=True))
    if required:
        holding = {mask for mask in masks_of_size(len(scores), size) if mask & required == required}
        partitions = [partition for partition in partitions if not holding.isdisjoint(partition[1])]
    most = max(total for total, _ in partitions)
    best = {mask for total, row in partitions if total == most for mask in row}
    return by_preference(worth, (mask for mask in best if mask & required == required)), most


@cache
def list_partitions(devices: int, size: int) -> Table:
    """Lists every partition of so many devices into sets of `size`. Cached: it does not depend on scores."""
    full = devices // size
    partitions = [
        [mask_of_members(each, devices) for each in (*sets, left_over)]
        for left_over in combinations(range(devices), devices % size)
        for sets in equal_sets(tuple(device for device in range(devices) if device not in left_over), size)
    ]
    columns: list[Column] = [itemgetter(*masks) for masks in zip(*partitions, strict=True)]
    return Table(
        rows=tuple(tuple(masks[:full]) for masks in partitions),
        columns=tuple(columns if devices % size else columns[:-1]),
    )


def equal_sets(devices: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields every way to split the devices into sets of this size; the first device left leads the next set."""
    if not devices:
        yield []
        return
    for others in combinations(devices[1:], size - 1):
        rest = tuple(device for device in devices[1:] if device not in others)
        for sets in equal_sets(rest, size):
            yield [(devices[0], *others), *sets]
