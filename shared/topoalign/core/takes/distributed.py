"""
Takes CPUs evenly from several NUMA nodes (kubelet v1.36.3, CPU manager, distribute-cpus-across-numa).

The rule: as few NUMA nodes as can give the same number of CPUs each, in whole groups (a core, or a single CPU). Groups that
are left over go round-robin over some of these nodes. Of all choices the one that leaves the machine most even is taken, of
equals the first. If no choice can give that much, the take is packed.

Two defects of the kubelet are not followed. A choice of four or more nodes may be overwritten there by one that is looked at
later (kubernetes issue 141237), and where only fragments of groups are left the hand-out never ends (pull request 140730).

NUMA nodes side by side in the order that have equally many free CPUs are interchangeable, and the kubelet keeps the first
of equals; so only those choices are looked at which take them from the first on. An idle machine then has a handful of
choices whatever its size. Where most nodes differ, work is limited, and the answer says so.
"""

from collections.abc import Iterator, Sequence, Set
from math import isqrt
from typing import NamedTuple

from topoalign.core.errors import TooMuchWork
from topoalign.core.takes.packed import NotEnoughCpus, Taking, packed
from topoalign.core.topology.cpus import CpuTopology

MOST_CHOICES = 50_000
"""Choices that are looked at for one take: half a second or less. Eight NUMA nodes never have more than 2,000."""


class Split(NamedTuple):
    """Which NUMA nodes give CPUs, by their positions in the order of nodes."""

    nodes: tuple[int, ...]
    """Each gives the same number of groups."""
    extra: tuple[int, ...]
    """Those of them that give what is left over, one group at a time, in this order."""


def distributed(
    cpus: CpuTopology, available: Set[int], count: int, group: int, *, by_averages: bool = True
) -> frozenset[int]:
    """
    `count` of the available CPUs, in groups of `group`; `by_averages` as in `packed`.

    Raises NotEnoughCpus, and TooMuchWork after MOST_CHOICES.
    """
    if count > len(available):
        raise NotEnoughCpus(count, len(available))
    if count <= 0 or count % group:
        return packed(cpus, available, count, by_averages=by_averages)
    inside = {node: cpus.in_node[node] & available for node in Taking(cpus, available, count).nodes()}
    split = best_split(cpus, [len(free) for free in inside.values()], count, group)
    if split is None:
        return packed(cpus, available, count, by_averages=by_averages)
    parts = list(inside.values())
    taken: frozenset[int] = frozenset()
    each = count // len(split.nodes) // group * group
    for node in split.nodes:
        taken |= packed(cpus, parts[node], each, by_averages=by_averages)
    left = count - each * len(split.nodes)
    while left > 0:
        for node in split.extra:
            if left > 0 and len(parts[node] - taken) >= group:
                taken |= packed(cpus, parts[node] - taken, group, by_averages=by_averages)
                left -= group
    return taken


def best_split(cpus: CpuTopology, free: Sequence[int], count: int, group: int) -> Split | None:
    """The split over the fewest nodes, most even in what it leaves. `free` is the number of free CPUs per node in order."""
    groups = count // group
    groups_per_node = rounded_up(rounded_up(len(cpus.node_of), group), len(cpus.in_node))
    looked_at = 0
    for width in range(rounded_up(groups, groups_per_node), min(groups, len(free)) + 1):
        best: Split | None = None
        lowest: int | None = None
        for split, left in splits(free, width, count, group):
            looked_at += 1
            if looked_at > MOST_CHOICES:
                raise TooMuchWork(
                    f"more than {MOST_CHOICES} ways to distribute {count} CPUs over {len(free)} NUMA nodes",
                    "ask for CPUs that fit on fewer NUMA nodes, or do without distribute-cpus-across-numa",
                )
            score = unevenness(left) if left is not None else None
            if score is not None and (lowest is None or score < lowest):
                best, lowest = split, score
            if lowest == 0:
                break
        if best is not None:
            return best
    return None


def rounded_up(amount: int, by: int) -> int:
    return -(-amount // by)


def splits(free: Sequence[int], width: int, count: int, group: int) -> Iterator[tuple[Split, list[int] | None]]:
    """All splits over `width` nodes in the kubelet's order, with the free CPUs that each leaves; None: it cannot be."""
    each = count // width // group * group
    rest = count - each * width
    able = [node for node, amount in enumerate(free) if amount >= each]
    most = sorted((free[node] // group for node in able), reverse=True)[:width]
    if sum(most) * group < count:
        return
    for nodes in choices(free, able, width):
        left = list(free)
        for node in nodes:
            left[node] -= each
        if sum(free[node] // group for node in nodes) * group < count:
            yield Split(nodes, ()), None
        elif not rest:
            yield Split(nodes, ()), left
        else:
            giving = [node for node in nodes if left[node] >= group]
            for size in range(len(giving), 0, -1):
                for extra in choices(left, giving, size):
                    yield Split(nodes, extra), handed_round(left, extra, rest, group)


def choices(free: Sequence[int], nodes: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """
    The subsets of `nodes` of this size in lexicographic order, without those that an equal earlier one makes needless.

    Of neighbours with equally many free CPUs a subset holds the first ones.
    """

    def extended(chosen: tuple[int, ...], start: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == size:
            yield chosen
            return
        for at in range(start, len(nodes) - size + len(chosen) + 1):
            if at == start or free[nodes[at]] != free[nodes[at - 1]]:
                yield from extended((*chosen, nodes[at]), at + 1)

    return extended((), 0)


def handed_round(left: Sequence[int], extra: Sequence[int], rest: int, group: int) -> list[int] | None:
    """What is left when `rest` more CPUs are given, a group per node in turn; None if these nodes have too few."""
    if sum(left[node] // group for node in extra) * group < rest:
        return None
    after = list(left)
    while rest > 0:
        for node in extra:
            if rest > 0 and after[node] >= group:
                after[node] -= group
                rest -= group
    return after


def unevenness(amounts: Sequence[int]) -> int:
    """
    The standard deviation in thousandths, rounded; the mean is rounded to thousandths, too.

    In whole numbers: the kubelet adds floating-point numbers in random order and hides it by the same rounding.
    """
    mean = (2000 * sum(amounts) + len(amounts)) // (2 * len(amounts))
    squares = sum((1000 * amount - mean) ** 2 for amount in amounts)
    return (isqrt(4 * squares // len(amounts)) + 1) // 2
