"""
topology: the best connected GPUs for this container that leave the best ones for the next.

A set is worth the sum of three parts. The set that is worth the most is chosen, of equals the one with the lowest indexes:

- **own**: its link score, as a share of the best set of as many GPUs that the machine has (a single GPU has no links);
- **left**, by half: what the GPUs that are still free afterwards can be split into, for the sizes 2, 4 and 8: the total of
  the best partition in units of the machine's best set of that size. So a single GPU is taken from where it breaks no pair
  while there is an odd one, and of equally good sets the one goes whose loss is the least;
- **NICs**, by a tenth, where the container asks for some: how near the free NICs are to the set, 1 for one beside each.

Links through NVSwitch, and NVLinks within a clique, count as `pair_score` has them.

While up to nine GPUs are free, all sets are compared and all partitions are exact (`partition`). With more, partitions are
made by matching the best pairs first, then pairs of pairs, and so on (`matched`); where there are more than 126 sets, those
are compared that grow from each GPU by what adds most, and the set of the best partition; and of more than 18 free GPUs only
the few that look best by links, NICs and the links that they would cut are weighed by what they leave.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nsmallest
from itertools import combinations
from math import comb
from typing import NamedTuple

from topoalign.core.model.topology.links import PCIE_SCORE, PcieClass
from topoalign.core.placement.gpus.scores import Scores, total
from topoalign.core.placement.partition import best_sets, best_split, best_total
from topoalign.core.placement.partition.greedy import grow
from topoalign.core.placement.partition.tables import MOST_LISTED

MOST_COMPARED = comb(MOST_LISTED, MOST_LISTED // 2)
"""Sets: all there are of nine GPUs."""
MOST_WEIGHED = 12
"""Sets that are weighed by what they leave, where more than `MOST_MATCHED` GPUs are free: 64 take some 50 ms."""
MOST_MATCHED = 18
"""Free GPUs up to which all sets are weighed that are compared."""
MOST_KEPT = 4096
"""Sets whose worth is remembered, by themselves and if they are left: of a machine with eight GPUs all 256."""
SIZES = (2, 4, 8)
LEFT, NICS = 0.5, 0.1
"""How much these parts weigh beside the set's own. Found by `topoalign bench placement-quality`."""
BESIDE = PCIE_SCORE[PcieClass.PIX]


class Nics(NamedTuple):
    """The NICs that a container could get, and how near each is to the GPUs."""

    wanted: int
    nearness: Sequence[Sequence[int]]
    """For each free NIC its pair scores with all GPUs, by their positions."""


NO_NICS = Nics(0, ())


Asked = tuple[frozenset[int], frozenset[int], int, frozenset[int]]
"""What is available, what is required, how many are wanted, and all that is free."""


class SetScorer:
    """Scores sets of GPUs of one machine. Remembers what it computed, so keep one per machine."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.best, self.exact = best_sets(scores, range(len(scores)))
        """The score of the best set of 0, 1, 2, … GPUs, and whether there is no better."""
        self._own: dict[tuple[int, ...], float] = {}
        self._left: dict[frozenset[int], float] = {}
        self._chosen: dict[Asked, tuple[int, ...]] = {}

    def chosen(self, asked: Asked, choose: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the answer to a question. Remembered: the same GPUs stay free, as on a node between two pods."""
        if asked not in self._chosen:
            if len(self._chosen) >= MOST_KEPT:
                self._chosen.clear()
            self._chosen[asked] = choose()
        return self._chosen[asked]

    def own(self, members: tuple[int, ...]) -> float:
        """The link score of a set as a share of the machine's best set of that size; 0 for a single GPU."""
        if members not in self._own:
            if len(self._own) >= MOST_KEPT:
                self._own.clear()
            best = self.best[len(members)]
            self._own[members] = total(self.scores, members) / best if best else 0.0
        return self._own[members]

    def left(self, rest: frozenset[int]) -> float:
        """The worth of what these GPUs can be split into: how many of the machine's best pairs, fours and eights."""
        if rest not in self._left:
            if len(self._left) >= MOST_KEPT:
                self._left.clear()
            self._left[rest] = sum(self.splits(tuple(sorted(rest))).values())
        return self._left[rest]

    def splits(self, rest: tuple[int, ...]) -> dict[int, float]:
        """Size -> the total of the best partition into sets of that size, in units of the machine's best set."""
        sizes = [size for size in SIZES if size <= len(rest) and self.best[size]]
        if len(rest) <= MOST_LISTED:
            return {size: best_total(self.scores, rest, size) / self.best[size] for size in sizes}
        worths = dict(zip(SIZES, matched(self.scores, rest, len(SIZES)), strict=True))
        return {size: worths[size] / self.best[size] for size in sizes}


def matched(scores: Scores, rest: Sequence[int], rounds: int) -> list[int]:
    """
    The worth of good partitions of these GPUs into 2, 4, 8, …: one number for each of so many rounds.

    Each round joins two groups, those with the highest scores between them first. On hierarchical machines no partition
    is better; on others it is good, and costs little.
    """
    groups: list[tuple[int, ...]] = [(gpu,) for gpu in rest]
    totals = []
    for _ in range(rounds):
        between = [
            (-sum(scores[a][b] for a in one for b in other), i, j)
            for (i, one), (j, other) in combinations(enumerate(groups), 2)
        ]
        taken: set[int] = set()
        joined = []
        for _, i, j in sorted(between):
            if i not in taken and j not in taken:
                taken |= {i, j}
                joined.append(groups[i] + groups[j])
        groups = joined
        totals.append(sum(total(scores, group) for group in groups))
    return totals


def by_topology(
    outlook: SetScorer,
    available: Sequence[int],
    required: Collection[int],
    size: int,
    free: Iterable[int] = (),
    nics: Nics = NO_NICS,
) -> tuple[int, ...]:
    """
    Chooses the set of `size` available positions, ascending, that is worth the most and holds all required ones.

    `free` are all GPUs that nobody holds, including those that are not offered here.
    """
    everything = frozenset((*free, *available))
    if nics.wanted:
        return weighed(outlook, available, required, size, everything, nics)
    asked = (frozenset(available), frozenset(required), size, everything)
    return outlook.chosen(asked, lambda: weighed(outlook, available, required, size, everything, nics))


def weighed(
    outlook: SetScorer,
    available: Sequence[int],
    required: Collection[int],
    size: int,
    everything: frozenset[int],
    nics: Nics,
) -> tuple[int, ...]:
    """The best of all sets that are compared; of more than MOST_MATCHED free GPUs only those best at first sight."""
    sets = candidates(outlook.scores, available, required, size)
    if len(everything) > MOST_MATCHED:
        sets = nsmallest(MOST_WEIGHED, sets, key=lambda members: at_first_sight(outlook, members, everything, nics))

    def rank(members: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -worth(outlook, members, everything, nics).whole, members

    return min(map(rank, sets))[1]


def is_exact(free: int) -> bool:
    """Whether partitions of what is left are exact where so many GPUs are free."""
    return free <= MOST_LISTED


def most_weighed(free: int) -> int:
    """The most sets that are weighed with all their parts where so many GPUs are free."""
    return MOST_COMPARED if free <= MOST_MATCHED else MOST_WEIGHED


class Worth(NamedTuple):
    """The worth of a set, in parts that are weighted already."""

    own: float
    left: float
    nics: float

    @property
    def whole(self) -> float:
        """The sum of the parts, rounded, so that equal sets are equal in whatever order their parts were added."""
        return round(self.own + self.left + self.nics, 9)


def worth(outlook: SetScorer, members: tuple[int, ...], free: frozenset[int], nics: Nics) -> Worth:
    """Weighs a set that is taken from the free GPUs."""
    left = outlook.left(free.difference(members))
    return Worth(outlook.own(members), LEFT * left, NICS * nearness(nics, members))


def at_first_sight(
    outlook: SetScorer, members: tuple[int, ...], free: frozenset[int], nics: Nics
) -> tuple[float, int, tuple[int, ...]]:
    """The key that sorts sets, the best first, by links, NICs and the links that they cut, without what they leave."""
    cut = sum(outlook.scores[member][other] for member in members for other in free.difference(members))
    return -round(outlook.own(members) + NICS * nearness(nics, members), 9), cut, members


def candidates(
    scores: Scores, available: Sequence[int], required: Collection[int], size: int
) -> Iterable[tuple[int, ...]]:
    """The sets to compare, each ascending: all of them, or beyond MOST_COMPARED those that grow well."""
    free = [position for position in sorted(available) if position not in required]
    if comb(len(free), size - len(required)) <= MOST_COMPARED:
        if not required:
            return combinations(free, size)
        return (tuple(sorted((*required, *others))) for others in combinations(free, size - len(required)))
    seeds = [(*required, *([other] if len(required) < size else [])) for other in free]
    grown = {tuple(sorted(grow(scores, sorted(available), seed, size))) for seed in seeds}
    return {best_split(scores, available, required, size).members, *grown}


def nearness(nics: Nics, members: Collection[int]) -> float:
    """How near the wanted NICs are to their nearest GPU of the set: 1 for a switch in common, on average."""
    if not nics.wanted:
        return 0.0
    nearest = sorted((max(row[member] for member in members) for row in nics.nearness), reverse=True)[: nics.wanted]
    return sum(nearest) / (BESIDE * nics.wanted)
