"""
Finds the best partition of devices that form a tree: DGX-2, HGX, NVL72, and most machines without direct NVLinks.

There the scores are hierarchical: blocks of devices, within each block smaller blocks with higher scores, and any two
devices of different blocks of a level have the same score. What matters of the devices that are left is only how they
are spread over equal blocks (`Forms`), and few forms occur.

Sets are cut off one after the other, and the next one must hold a certain device, for some set has to. Two bounds say
how much the rest can still be worth, and end a branch that cannot beat the best so far:

- by sets: no set is worth more than the best one that could be cut off now;
- by levels: no block can hold more pairs within sets than if it were split on its own.

Then all first sets that belong to a best partition are compared, and the best is found in the machine itself: which of
the blocks with the same form it takes devices from.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from math import comb
from typing import NamedTuple

from topoalign.core.placement.gpus.seam import Scores
from topoalign.core.placement.partition.search_budget import PartitionSearchBudget
from topoalign.core.placement.partition.tree_shapes import DEVICE, EMPTY, NEEDED, Forms

MOST_IN_TREE = 128
"""Devices: the search goes as deep as there are sets."""


class ScoreBlock(NamedTuple):
    """Devices of which any two from different children have the same score, the least within the block."""

    value: int
    children: tuple["Tree", ...]


Tree = ScoreBlock | int
"""A block, or the position of a device."""


def build_score_tree(scores: Scores, positions: Sequence[int]) -> Tree | None:
    """The tree that the scores of these devices form. None: their scores are not hierarchical."""
    if len(positions) == 1:
        return positions[0]
    least = min(scores[a][b] for at, a in enumerate(positions) for b in positions[:at])
    groups: list[list[int]] = []
    rest = list(positions)
    while rest:
        row = scores[rest[0]]
        group = [rest[0], *(other for other in rest[1:] if row[other] > least)]
        rest = [other for other in rest[1:] if row[other] == least]
        if any(scores[a][b] != least for a in group for b in rest):
            return None
        groups.append(group)
    if len(groups) == 1:
        return None
    children = [build_score_tree(scores, group) for group in groups]
    return None if None in children else ScoreBlock(least, tuple(child for child in children if child is not None))


def best_by_tree(
    tree: Tree, devices: int, required: Sequence[int], size: int, work: PartitionSearchBudget
) -> tuple[int, int]:
    """
    Finds the chosen set, as a mask, and the total.

    Raises TooMuchWork where hardly any blocks are equal and sets are large: three quarters of an NVL72 whose trays are
    split in halves may be too much.
    """
    return TreeSplit(tree, devices, required, size, work).solved()


def untaken_form(forms: Forms, tree: Tree, required: Set[int]) -> int:
    """The form of a tree in which no device is taken and the next set must hold the required ones."""
    if isinstance(tree, int):
        return NEEDED if tree in required else DEVICE
    return forms.block(tree.value, [untaken_form(forms, child, required) for child in tree.children])


class TreeSplit:
    """The search for the best partition of one tree into sets of one size."""

    def __init__(
        self, tree: Tree, devices: int, required: Sequence[int], size: int, work: PartitionSearchBudget
    ) -> None:
        self.tree = tree
        self.devices = devices
        self.required = frozenset(required)
        self.size = size
        self.forms = Forms(size, work)
        self.exact: dict[int, int] = {}
        """Form -> the most that its partitions are worth."""
        self.upper: dict[int, int] = {}
        """Form -> what they do not exceed."""
        self._gains: dict[tuple[int, int], int] = {}
        self._lowest: dict[tuple[int, int], int] = {}

    def solved(self) -> tuple[int, int]:
        """Finds the chosen set, as a mask, and the total. Raises TooMuchWork."""
        whole = untaken_form(self.forms, self.tree, self.required)
        most = self.greatest(whole)
        full, left_over = divmod(self.devices, self.size)
        average = 0 if self.required else (most - self.forms.best(whole)[left_over]) // full
        takes = self.forms.takes(whole, self.size, average).items()
        rests: dict[int, int] = {}
        for rest, score in sorted(takes, key=lambda take: -take[1]):
            if rests and score < min(rests.values()):
                break
            if score + self.bound(rest) >= most and self.most(rest, most - score - 1) is not None:
                rests[rest] = score
        return max(self.lowest(self.tree, rest, score) for rest, score in rests.items()), most

    def greatest(self, whole: int) -> int:
        """
        The most that a partition is worth. Raises TooMuchWork.

        Aims just below the bound first, and then lower: that a branch does not reach so high is soon known, and makes
        its bound lower for the next search.
        """
        limit = self.bound(whole)
        below = 1
        while True:
            floor = max(limit - below, -1)
            if self.required:
                found = self.best_cut(self.takes_above(whole, self.size, floor), floor)
            else:
                found = self.most(whole, floor)
            if found is not None:
                return found
            below *= 16

    def most(self, form: int, floor: int) -> int | None:
        """The most that partitions of a form are worth; None if that is not above `floor`. Raises TooMuchWork."""
        if self.forms.sizes[form] <= self.size:
            score = self.forms.scores[form]
            return score if score > floor else None
        if form in self.exact:
            return self.exact[form] if self.exact[form] > floor else None
        limit = self.bound(form)
        if limit <= floor:
            return None
        marked = self.forms.marked(form)
        takes = self.takes_above(marked, self.size, floor)
        left_over = self.forms.sizes[form] % self.size
        if left_over:
            takes += self.takes_above(marked, left_over, floor)
        best = self.best_cut(takes, floor, limit)
        if best is None:
            self.upper[form] = floor
        else:
            self.exact[form] = best
        return best

    def takes_above(self, form: int, count: int, floor: int) -> list[tuple[int, int]]:
        """The takes of `count` devices that leave a chance of a total above the floor."""
        others = self.by_sets(form, self.forms.sizes[form] - count)
        return [*self.forms.takes(form, count, floor + 1 - others).items()]

    def by_sets(self, form: int, devices: int) -> int:
        """A bound on sets of so many devices in all, each worth as much as the best one of the form."""
        best = self.forms.best(form)
        full, left_over = divmod(devices, self.size)
        return best[left_over] + (full * best[self.size] if full else 0)

    def pairs(self, devices: int) -> int:
        """The number of pairs of so many devices that can be in the same set."""
        full, left_over = divmod(devices, self.size)
        return full * comb(self.size, 2) + comb(left_over, 2)

    def best_cut(self, takes: Iterable[tuple[int, int]], floor: int, limit: int | None = None) -> int | None:
        """The most that one of these takes and the rest of it are worth; None if that is not more than `floor`."""
        self.forms.work.step()
        best = floor
        promising = sorted(((score + self.bound(rest), score, rest) for rest, score in takes), reverse=True)
        for bound, score, rest in promising:
            if bound <= best or best == limit:
                break
            found = self.most(rest, best - score)
            if found is not None:
                best = score + found
        return best if best > floor else None

    def bound(self, form: int) -> int:
        """A total that no partition of this form exceeds."""
        if form in self.exact:
            return self.exact[form]
        if form not in self.upper:
            size = self.forms.sizes[form]
            value = self.forms.values[form]
            inner = sum(number * self.gain(child, value) for child, number in self.forms.groups(form))
            self.upper[form] = min(self.by_sets(form, size), value * self.pairs(size) + inner)
        return self.upper[form]

    def gain(self, form: int, outer: int) -> int:
        """The most that the pairs within this form can add if all count `outer`, as in the block around it."""
        key = form, outer
        if key not in self._gains:
            value = self.forms.values[form]
            inner = sum(number * self.gain(child, value) for child, number in self.forms.groups(form))
            self._gains[key] = (value - outer) * self.pairs(self.forms.sizes[form]) + inner
        return self._gains[key]

    def lowest(self, tree: Tree, rest: int, least: int = 0) -> int:
        """Of the sets with the best score that leave this form of a tree, that with the lowest indexes, as a mask."""
        if isinstance(tree, int):
            return 1 << self.devices - 1 - tree if rest == EMPTY else 0
        form = untaken_form(self.forms, tree, self.required)
        if form == rest:
            return 0
        if (id(tree), rest) not in self._lowest:
            ways = self.forms.ways(form, self.forms.sizes[form] - self.forms.sizes[rest], least)
            fitting = [way for way in ways if self.forms.block(tree.value, way) == rest]
            best = max(ways[way] for way in fitting)
            self._lowest[id(tree), rest] = max(self.assigned(tree, way) for way in fitting if ways[way] == best)
        return self._lowest[id(tree), rest]

    def assigned(self, tree: ScoreBlock, way: Sequence[int]) -> int:
        """The lowest set that leaves the children this way: which children with equal forms are left which rest."""
        groups = self.forms.groups(untaken_form(self.forms, tree, self.required))
        olds = [child for child, number in groups for _ in range(number)]
        changes = Counter(zip(olds, way, strict=True))
        states = {tuple(changes.values()): 0}
        for child in tree.children:
            own = untaken_form(self.forms, child, self.required)
            grown: dict[tuple[int, ...], int] = {}
            for left, mask in states.items():
                for at, (old, rest) in enumerate(changes):
                    if old == own and left[at]:
                        after = (*left[:at], left[at] - 1, *left[at + 1 :])
                        grown[after] = max(grown.get(after, 0), mask | self.lowest(child, rest))
            self.forms.work.step(len(grown))
            states = grown
        return states[(0,) * len(changes)]
