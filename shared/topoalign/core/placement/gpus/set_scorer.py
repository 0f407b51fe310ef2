"""
What sets of GPUs are worth: by their links, and by what they leave to the next containers.

Both are shares of what the machine has: a set of four that scores as the best four there are is worth 1.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from topoalign.core.placement.gpus.scores import Scores, total
from topoalign.core.placement.partition import best_sets, best_total
from topoalign.core.placement.partition.tables import MOST_LISTED

MOST_KEPT = 4096
"""Sets whose worth is remembered, by themselves and if they are left: of a machine with eight GPUs all 256."""
SIZES = (2, 4, 8)


class Nics(NamedTuple):
    """The NICs that a container could get, and how near each is to the GPUs."""

    wanted: int
    nearness: Sequence[Sequence[int]]
    """For each free NIC its pair scores with all GPUs, by their positions."""


NO_NICS = Nics(0, ())


Asked = tuple[str, frozenset[int], frozenset[int], int, frozenset[int]]
"""The device policy, what is available, what is required, how many are wanted, and all that is free, if that has a say."""


class SetScorer:
    """Scores sets of GPUs of one machine. Remembers what it computed, so keep one per machine."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._own: dict[tuple[int, ...], float] = {}
        self._left: dict[frozenset[int], float] = {}
        self._chosen: dict[Asked, tuple[int, ...]] = {}

    @cached_property
    def _best_sets(self) -> tuple[Sequence[int], bool]:
        return best_sets(self.scores, range(len(self.scores)))

    @property
    def best(self) -> Sequence[int]:
        """The score of the best set of 0, 1, 2, … GPUs."""
        return self._best_sets[0]

    @property
    def exact(self) -> bool:
        """Whether no set of any size scores higher than in `best`; False: those were found greedily."""
        return self._best_sets[1]

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
        if not sizes:
            return {}
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
