"""
GPU partitions: sets of GPUs that a fabric manager can set apart, from a table of the node (koordinator a7a1b76b).

Partitions of the wanted size are tried by groups of equal `allocationScore`. Upstream's comment says that a higher score is
preferred and its code tries the lowest first; the default follows the comment. Within a group the partition is taken that
leaves the most for larger requests.
"""

from collections.abc import Iterator, Set
from itertools import groupby

from topoalign.core.deviceshare.annotations import quantity
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.inventory import Partition, Table

WEIGHTS = {8: 10_000, 4: 100, 2: 1}
"""Size -> what a partition of that size is worth that stays whole, times its score."""


def feasible_partitions(
    demand: JointDemand, table: Table, size: int, used: frozenset[int], usable: Set[int]
) -> Iterator[Partition]:
    """
    Yields the partitions of unused, usable GPUs, the preferred one first.

    A restricted demand looks at the first score group only. Upstream stops at the first group that has a feasible one:
    take no more than the first to be equal to it.
    """
    spec = demand.partition
    compat = demand.compat
    least = quantity(spec.ring_bus_bandwidth) if spec is not None and spec.ring_bus_bandwidth is not None else None
    groups = score_groups(table, size, compat=compat)
    for group in groups[:1] if demand.restricted else groups:
        found = [
            partition
            for partition in group
            if used.isdisjoint(partition.minors)
            and usable >= {*partition.minors}
            and (least is None or (partition.bandwidth is not None and partition.bandwidth >= least))
        ]
        yield from sorted(found, key=lambda partition: -worth_left(table, size, used, partition, compat=compat))


def score_groups(table: Table, size: int, *, compat: bool) -> list[list[Partition]]:
    """Groups partitions of one size by score, the preferred group first."""
    listed = sorted(table.get(size, ()), key=lambda partition: partition.score if compat else -partition.score)
    return [list(group) for _, group in groupby(listed, key=lambda partition: partition.score)]


def worth_left(table: Table, size: int, used: frozenset[int], taken: Partition, *, compat: bool) -> int:
    """The worth of the partitions that are still whole once this one is taken, of its size and above."""
    gone = used | {*taken.minors}
    return sum(
        weight * partition.score
        for left, weight in WEIGHTS.items()
        if left >= size
        for partition in next(iter(score_groups(table, left, compat=compat)), ())
        if gone.isdisjoint(partition.minors)
    )
