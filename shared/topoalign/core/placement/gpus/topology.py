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

from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.links import PCIE_SCORE, PcieClass
from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice, Members
from topoalign.core.placement.gpus.scores import Scores
from topoalign.core.placement.gpus.set_scorer import NO_NICS, Nics, SetScorer
from topoalign.core.placement.partition import best_split
from topoalign.core.placement.partition.greedy import grow
from topoalign.core.placement.partition.tables import MOST_LISTED

MOST_COMPARED = comb(MOST_LISTED, MOST_LISTED // 2)
"""Sets: all there are of nine GPUs."""
MOST_WEIGHED = 12
"""Sets that are weighed by what they leave, where more than `MOST_MATCHED` GPUs are free: 64 take some 50 ms."""
MOST_MATCHED = 18
"""Free GPUs up to which all sets are weighed that are compared."""
LEFT, NICS = 0.5, 0.1
"""How much these parts weigh beside the set's own. Found by `topoalign bench placement-quality`."""
BESIDE = PCIE_SCORE[PcieClass.PIX]
TOLD = 0.0005
"""The least difference in worth that is shown."""


class ByTopology(DevicePolicy):
    """topoalign's own device policy: chooses the set that is worth the most, by the rule of this module."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the set that is worth the most and holds all required GPUs."""
        return by_topology(asked.scorer, asked.available, asked.required, asked.size, asked.free, asked.nics)

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains that so many GPUs are free that not all sets are compared, or what they leave is not exact."""
        free = len(asked.free.union(asked.available))
        ways = comb(len(asked.available) - len(asked.required), asked.size - len(asked.required))
        said = "" if free <= MOST_LISTED else ", what is left judged by matching pairs, fours and eights"
        most = MOST_COMPARED if free <= MOST_MATCHED else MOST_WEIGHED
        return said if ways <= most else f"{said}, of the {most} that look best: all {ways} are too many to weigh"

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that explains, part by part, what another set is worth more or less than this one."""

        def judged(members: Members) -> Worth:
            return worth(asked.scorer, members, asked.free.union(members), asked.nics)

        mine = judged(chosen)

        def against(other: Members) -> str:
            theirs = judged(other)
            parts = {"by its links": theirs.own - mine.own, "by what it leaves": theirs.left - mine.left}
            parts["by its NICs"] = theirs.nics - mine.nics
            told = [f"{change:+.3f} {part}" for part, change in parts.items() if abs(change) >= TOLD]
            return f"worth {', '.join(told)}" if told else "worth the same; its indexes decided"

        return against


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
    asked = (Placement.TOPOLOGY, frozenset(available), frozenset(required), size, everything)
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
