"""
topology: the best connected GPUs for this container that leave the best ones for the next.

A set is worth the sum of three parts. The set that is worth the most is chosen, of equals the one with the lowest indexes:

- **own**: its link score, as a share of the best set of as many GPUs that the machine has (a single GPU has no links);
- **left**, by half: what the GPUs that are still free afterwards can be split into, for the sizes 2, 4 and 8: the total of
  the best partition in units of the machine's best set of that size. So a single GPU is taken from where it breaks no pair
  while there is an odd one, and of equally good sets the one goes whose loss is the least;
- **NICs**, by a tenth, where the container asks for some: how near the free NICs are to the set, 1 for one beside each.

Links through NVSwitch, and NVLinks within a clique, count as `pair_score` has them. Up to nine GPUs to choose from, all sets
are compared, and what is left is exact (`partition`). With more, the sets are compared that grow from each GPU by what adds
most, and the set of the best partition. The best few of them, by links, NICs and the links that they would cut, are weighed
by what they leave; and if more than nine GPUs are left, the best set of each size stands for a partition.
"""

from collections.abc import Collection, Iterable, Sequence
from heapq import nsmallest
from itertools import combinations
from math import comb
from typing import NamedTuple

from topoalign.core.placement.partition import best_sets, best_split, best_total
from topoalign.core.placement.partition.greedy import grow, grown_best
from topoalign.core.placement.partition.tables import MOST_LISTED
from topoalign.core.placement.scores import Scores, total
from topoalign.core.topology.links import PCIE_SCORE, PcieClass

MOST_COMPARED = comb(MOST_LISTED, MOST_LISTED // 2)
"""Sets: all there are of nine GPUs."""
MOST_WEIGHED = 16
"""Sets that are weighed by what they leave, where there are more than nine GPUs: 64 take some 50 ms."""
MOST_KEPT = 4096
"""Answers to what is left that are remembered: of a machine with eight GPUs all 256."""
SIZES = (2, 4, 8)
LEFT, NICS = 0.5, 0.1
"""How much these parts weigh beside the set's own. Found by `topoalign bench placement-quality`."""
BESIDE = PCIE_SCORE[PcieClass.PIX]


class Nics(NamedTuple):
    """The NICs that a container could get."""

    wanted: int
    nearness: Sequence[Sequence[int]]
    """For each free NIC its pair scores with all GPUs, by their positions."""


NO_NICS = Nics(0, ())


class Outlook:
    """What the GPUs of one machine are worth. Remembers what it worked out, so keep one per machine."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.best = best_sets(scores, range(len(scores))).best
        """The score of the best set of 0, 1, 2, … GPUs."""
        self._left: dict[tuple[int, ...], float] = {}

    def own(self, members: Collection[int]) -> float:
        best = self.best[len(members)]
        return total(self.scores, members) / best if best else 0.0

    def left(self, rest: tuple[int, ...]) -> float:
        """What these GPUs, ascending, can be split into: how many of the machine's best pairs, fours and eights."""
        if rest not in self._left:
            if len(self._left) >= MOST_KEPT:
                self._left.clear()
            self._left[rest] = sum(self.splits(rest).values())
        return self._left[rest]

    def splits(self, rest: tuple[int, ...]) -> dict[int, float]:
        """For each size the total of the best partition, in units of the machine's best set."""
        sizes = [size for size in SIZES if size <= len(rest) and self.best[size]]
        if len(rest) <= MOST_LISTED:
            return {size: best_total(self.scores, rest, size) / self.best[size] for size in sizes}
        best = grown_best(self.scores, rest, max(sizes, default=1))
        return {size: len(rest) // size * best[size] / self.best[size] for size in sizes}


def by_topology(
    outlook: Outlook,
    available: Sequence[int],
    required: Collection[int],
    size: int,
    free: Iterable[int] = (),
    nics: Nics = NO_NICS,
) -> tuple[int, ...]:
    """
    The set of `size` available positions, ascending, that is worth the most and holds all required ones.

    `free` are all GPUs that nobody holds, those that are not offered here included.
    """
    everything = frozenset((*free, *available))
    sets = candidates(outlook.scores, available, required, size)
    if len(everything) > MOST_LISTED:
        sets = nsmallest(MOST_WEIGHED, sets, key=lambda members: at_first_sight(outlook, members, everything, nics))

    def rank(members: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -worth(outlook, members, everything, nics).whole, members

    return min(map(rank, sets))[1]


def most_weighed(free: int) -> int:
    """How many sets are weighed with all their parts where so many GPUs are free."""
    return MOST_COMPARED if free <= MOST_LISTED else MOST_WEIGHED


class Worth(NamedTuple):
    """What a set is worth, in parts that have their weight already."""

    own: float
    left: float
    nics: float

    @property
    def whole(self) -> float:
        """Rounded, so that equal sets are equal whatever order their parts were added up in."""
        return round(self.own + self.left + self.nics, 9)


def worth(outlook: Outlook, members: tuple[int, ...], free: frozenset[int], nics: Nics) -> Worth:
    """Of a set that is taken from the free GPUs."""
    rest = tuple(sorted(free.difference(members)))
    return Worth(outlook.own(members), LEFT * outlook.left(rest), NICS * nearness(nics, members))


def at_first_sight(
    outlook: Outlook, members: tuple[int, ...], free: frozenset[int], nics: Nics
) -> tuple[float, int, tuple[int, ...]]:
    """Sorts sets, the best first, without a look at all that they leave."""
    cut = sum(outlook.scores[member][other] for member in members for other in free.difference(members))
    return -round(outlook.own(members) + NICS * nearness(nics, members), 9), cut, members


def candidates(
    scores: Scores, available: Sequence[int], required: Collection[int], size: int
) -> Iterable[tuple[int, ...]]:
    """The sets to compare, ascending each."""
    free = [position for position in sorted(available) if position not in required]
    if comb(len(free), size - len(required)) <= MOST_COMPARED:
        return (tuple(sorted((*required, *others))) for others in combinations(free, size - len(required)))
    seeds = [(*required, *([other] if len(required) < size else [])) for other in free]
    grown = {tuple(sorted(grow(scores, sorted(available), seed, size))) for seed in seeds}
    return {best_split(scores, available, required, size).members, *grown}


def nearness(nics: Nics, members: Collection[int]) -> float:
    """How near the nearest of the wanted NICs are to their nearest GPU of the set: 1 for a switch in common, on average."""
    if not nics.wanted:
        return 0.0
    nearest = sorted((max(row[member] for member in members) for row in nics.nearness), reverse=True)[: nics.wanted]
    return sum(nearest) / (BESIDE * nics.wanted)
