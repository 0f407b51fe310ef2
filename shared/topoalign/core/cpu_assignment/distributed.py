"""
Takes CPUs evenly from several NUMA nodes (kubelet v1.36.3, CPU manager, distribute-cpus-across-numa).

The rule: the smallest number of NUMA nodes that can each give the same number of CPUs, in whole groups (a core, or a
single CPU). Remaining groups are taken round-robin from some of these nodes. Of all choices, the one is used after
which the free CPUs of the machine are most evenly distributed. Of equal choices, the first one is used. If no choice
has enough CPUs, the CPUs are packed.

Two defects of the kubelet are not repeated. There, a later choice can overwrite a choice of four or more nodes
(kubernetes issue 141237), and if only fragments of groups remain, the round-robin never ends (pull request 140730).

NUMA nodes that are adjacent in the order and have the same number of free CPUs are interchangeable, and the kubelet
keeps the first of equal choices. So only choices that take the first of such nodes are examined. An idle machine then
has only a few choices, regardless of its size. If most nodes differ, the number of steps is limited (TooMuchWork).
"""

from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain, groupby
from math import isqrt
from typing import NamedTuple

from topoalign.core.cpu_assignment.packed import NotEnoughCpus, Taking, take_packed
from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.cpu_topology import CpuTopology

MOST_STEPS = 2_000_000
"""Maximum number of steps of one take: about half a second. Eight NUMA nodes never need more than 60,000."""
STEPS_OF_A_LOOK = 20
"""Steps for examining a choice, in addition to one step per NUMA node of the machine."""


class Split(NamedTuple):
    """The NUMA nodes that give CPUs in one choice, by their positions in the order of nodes."""

    nodes: tuple[int, ...]
    """Each gives the same number of groups."""
    extra: tuple[int, ...]
    """The nodes among these that give the remaining groups, one group at a time, in this order."""


def take_distributed(
    cpus: CpuTopology, available: Set[int], count: int, group: int, *, by_averages: bool = True
) -> frozenset[int]:
    """Takes `count` of the available CPUs evenly from NUMA nodes, in groups. Raises NotEnoughCpus and TooMuchWork."""
    if count > len(available):
        raise NotEnoughCpus(count, len(available))
    if count <= 0 or count % group:
        return take_packed(cpus, available, count, by_averages=by_averages)
    inside = {node: cpus.in_node[node] & available for node in Taking(cpus, available, count).nodes()}
    split = best_split(cpus, [len(free) for free in inside.values()], count, group)
    if split is None:
        return take_packed(cpus, available, count, by_averages=by_averages)
    parts = list(inside.values())
    taken: set[int] = set()
    each = count // len(split.nodes) // group * group
    for node in split.nodes:
        taken |= take_packed(cpus, parts[node], each, by_averages=by_averages)
    left = count - each * len(split.nodes)
    giving = deque(split.extra)
    while left > 0 and giving:
        node = giving.popleft()
        here = parts[node] - taken
        if len(here) >= group:
            taken |= take_packed(cpus, here, group, by_averages=by_averages)
            left -= group
            giving.append(node)
    # On uneven machines, a part can have taken CPUs of another one (`take_packed`, by averages). Missing CPUs are
    # packed.
    return take_packed(cpus, available - taken, left, by_averages=by_averages) | taken


def best_split(cpus: CpuTopology, free: Sequence[int], count: int, group: int) -> Split | None:
    """The split over the fewest nodes that leaves the free CPUs most even. `free`: per node. Raises TooMuchWork."""
    groups = count // group
    groups_per_node = _rounded_up(_rounded_up(len(cpus.node_of), group), len(cpus.in_node))
    steps = 0
    look = len(free) + STEPS_OF_A_LOOK
    for width in range(_rounded_up(groups, groups_per_node), min(groups, len(free)) + 1):
        best: Split | None = None
        lowest: int | None = None
        steps += look
        for split, left in _splits(free, width, count, group):
            steps += look
            if steps > MOST_STEPS:
                raise TooMuchWork(
                    f"too many ways to distribute {count} CPUs over {len(free)} NUMA nodes",
                    "ask for CPUs that fit on fewer NUMA nodes, or do without distribute-cpus-across-numa",
                )
            score = unevenness(left) if left is not None else None
            if score is not None and (lowest is None or score < lowest):
                best = split
                lowest = score
            if lowest == 0:
                break
        if best is not None:
            return best
    return None


def _rounded_up(amount: int, by: int) -> int:
    return -(-amount // by)


def _splits(free: Sequence[int], width: int, count: int, group: int) -> Iterator[tuple[Split, list[int] | None]]:
    """Yields the splits over `width` nodes in the kubelet's order, each with the CPUs that stay free. None: too few."""
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
                    yield Split(nodes, extra), _handed_round(left, extra, rest, group)


def choices(free: Sequence[int], nodes: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yields the subsets of `size` nodes in lexicographic order, each with the first of adjacent equally free nodes."""
    if size > len(nodes):
        return
    runs = [[*run] for _, run in groupby(nodes, key=free.__getitem__)]
    taken = _first_filled(runs, size)
    while True:
        yield tuple(chain.from_iterable(run[:amount] for run, amount in zip(runs, taken, strict=True)))
        behind = room = 0
        for last in reversed(range(len(runs))):
            if taken[last] and behind < room:
                break
            behind = behind + taken[last]
            room = room + len(runs[last])
        else:
            return
        taken[last:] = [taken[last] - 1, *_first_filled(runs[last + 1 :], behind + 1)]


def _first_filled(runs: Sequence[Sequence[int]], size: int) -> list[int]:
    """The number of nodes from each run if `size` nodes are taken, the earliest first."""
    amounts = []
    for run in runs:
        amounts.append(min(size, len(run)))
        size -= amounts[-1]
    return amounts


def _handed_round(left: Sequence[int], extra: Sequence[int], rest: int, group: int) -> list[int] | None:
    """The free CPUs after `rest` more are given round-robin, one group per node. None: the nodes have too few."""
    if sum(left[node] // group for node in extra) * group < rest:
        return None
    after = list(left)
    while rest > 0:
        extra = [node for node in extra if after[node] >= group]
        for node in extra[: rest // group]:
            after[node] -= group
        rest -= group * min(len(extra), rest // group)
    return after


def unevenness(amounts: Sequence[int]) -> int:
    """The standard deviation of these amounts in thousandths, rounded; the mean is rounded to thousandths, too."""
    # With integers: the kubelet adds floating-point numbers in random order, and hides differences by the same
    # rounding.
    mean = (2000 * sum(amounts) + len(amounts)) // (2 * len(amounts))
    squares = sum((1000 * amount - mean) ** 2 for amount in amounts)
    return (isqrt(4 * squares // len(amounts)) + 1) // 2
