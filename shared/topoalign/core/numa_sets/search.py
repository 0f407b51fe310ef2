"""
Finds sets of NUMA nodes that meet several needs at the same time, without listing all sets.

A search decides node by node, the highest first, and tries the sets without a node before those with it. So it finds
sets in ascending order of their masks. It abandons a branch if even the best of the lower nodes cannot meet some need,
or if the same needs failed before. On existing machines, few of the 2^n sets remain. But on many nodes, the problem can
be a hard knapsack problem. So each search counts its steps, and raises TooMuchWork at a limit.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.hints import ResourceNeed
from topoalign.core.model.topology.bitmask import Mask, nodes_of, union

MOST_STEPS = 100_000
"""Maximum number of steps of a decision: about half a second. Alignments on real machines take hundreds of steps."""


class NumaSearchBudget:
    """Counts the steps of one decision against a limit. All searches of the decision share it and end together."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.steps = steps

    @property
    def ended(self) -> bool:
        """Whether the limit was exceeded."""
        return self.steps < 0

    def step(self, steps: int = 1) -> None:
        """Counts `steps` more. Raises TooMuchWork when the limit is exceeded."""
        self.steps -= steps
        if self.steps < 0:
            raise TooMuchWork(
                "which NUMA nodes suit the request best was not found within the limit on work",
                "ask for less, or for what fits on fewer NUMA nodes",
            )


def mask_meets_needs(needs: Sequence[ResourceNeed], mask: Mask) -> bool:
    """Whether these NUMA nodes meet all needs. Supply that is near several of them counts once."""
    return all(sum(amount for near, amount in need.supply.items() if near & mask) >= need.amount for need in needs)


State = tuple[int, int, tuple[int, ...], Mask]
"""The properties that determine whether a branch has any set."""


class Branch(NamedTuple):
    """
    A part of a search: `more` of the lowest `top` nodes must be added to `chosen`. `short`: each need's missing amount.
    """

    top: int
    more: int
    short: tuple[int, ...]
    chosen: Mask


class Tried(NamedTuple):
    """Marks a branch on the stack, below its two halves. If neither half has found a set, the branch has failed."""

    state: State
    found: int
    """Number of sets that had been found before the branch."""


class Choosing:
    """Searches sets of nodes that contain all of `fixed` and otherwise only some of `nodes`, and meet the needs."""

    def __init__(self, nodes: Mask, needs: Sequence[ResourceNeed], work: NumaSearchBudget, fixed: Mask = 0) -> None:
        self.nodes = nodes_of(nodes & ~fixed)
        self.fixed = fixed
        self.work = work
        self.gains = _gains(needs, self.nodes)
        work.step(len(needs) + sum(len(need.supply) for need in needs) // 16)
        self.short = tuple(need.amount - sum(n for near, n in need.supply.items() if near & fixed) for need in needs)
        self.best = [_best_sums([sum(n for _, n in each[i]) for each in self.gains]) for i in range(len(needs))]
        self.shared = union(near for need in needs for near in need.supply if near.bit_count() > 1)
        self.failed: set[State] = set()

    def masks(self, size: int) -> Iterator[Mask]:
        """Yields the sets with `size` nodes, in ascending order of their masks. Raises TooMuchWork."""
        more = size - self.fixed.bit_count()
        if 0 <= more <= len(self.nodes):
            yield from self._below(Branch(len(self.nodes), more, self.short, self.fixed))

    def least_size(self) -> int | None:
        """The minimum number of nodes that meet the needs, at least 1. None: all are too few. Raises TooMuchWork."""
        most = self.fixed.bit_count() + len(self.nodes)
        if any(lacks > best[-1][-1] for lacks, best in zip(self.short, self.best, strict=True)):
            return None
        sizes = range(max(1, self.fixed.bit_count()), most + 1)
        return next((size for size in sizes if next(self.masks(size), None) is not None), None)

    def _below(self, start: Branch) -> Iterator[Mask]:
        """Yields the sets of a branch. It has its own stack, because more nodes are possible than nested calls."""
        found = 0
        undecided: list[Branch | Tried] = [start]
        while undecided:
            branch = undecided.pop()
            if isinstance(branch, Tried):
                if branch.found == found:
                    self.failed.add(branch.state)
                continue
            top, more, short, chosen = branch
            self.work.step(1 + len(short) // 8)
            if any(lacks > best[top][more] for lacks, best in zip(short, self.best, strict=True)):
                continue
            if not more:
                found += 1
                yield chosen
                continue
            state = (top, more, tuple(max(0, lacks) for lacks in short), chosen & self.shared)
            if state in self.failed:
                continue
            undecided.append(Tried(state, found))
            node = top - 1
            undecided.append(Branch(node, more - 1, self._taking(node, short, chosen), chosen | 1 << self.nodes[node]))
            if node >= more:
                undecided.append(Branch(node, more, short, chosen))

    def _taking(self, node: int, short: tuple[int, ...], chosen: Mask) -> tuple[int, ...]:
        """The missing amounts after this node is added. Supply that is near an already chosen node adds nothing."""
        pairs = zip(short, self.gains[node], strict=True)
        return tuple(lacks - sum(n for near, n in gain if not near & chosen) for lacks, gain in pairs)


def _gains(needs: Sequence[ResourceNeed], nodes: Sequence[int]) -> list[list[list[tuple[Mask, int]]]]:
    """For each node and each need, the parts of the need's supply that are near the node."""
    position = {node: i for i, node in enumerate(nodes)}
    near_node: list[list[list[tuple[Mask, int]]]] = [[[] for _ in needs] for _ in nodes]
    for number, need in enumerate(needs):
        for near, amount in need.supply.items():
            for node in nodes_of(near):
                if node in position:
                    near_node[position[node]][number].append((near, amount))
    return near_node


def _best_sums(amounts: Sequence[int]) -> list[list[int]]:
    """[top][more]: the largest sum of `more` of the first `top` amounts; -1 if `more` exceeds `top`."""
    rows = []
    for top in range(len(amounts) + 1):
        sums = list(accumulate(sorted(amounts[:top], reverse=True), initial=0))
        rows.append(sums + [-1] * (len(amounts) - top))
    return rows
