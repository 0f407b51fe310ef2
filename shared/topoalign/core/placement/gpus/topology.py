"""
Policy `topology`: chooses the set of GPUs on which a collective runs fastest; of equally fast sets the one that
fragments the rest the least.

Sets are compared by one key, element by element:

1. the weakest seam of the set (`seam`): NVLinks across its weakest division, else the PCIe path across. The strongest wins;
2. NICs, where the container asks for some: how many of these can be local to a member, then near one (`nics`);
3. the links that the set cuts: the scores of all links between its members and the GPUs that stay free. The fewest win, so
   pairs and groups of free GPUs stay whole for the next container;
4. the links of its own: the scores of all links among its members. The most win;
5. the lowest indexes.

    8 GPUs at an NVSwitch with 18 NVLinks each, GPU-0 without any: 4 GPUs are 1, 2, 3 and 4, and never GPU-0 (seam)
    the same machine, 1 GPU: GPU-0, because it cuts no NVLink
    4 linked pairs, GPU-1 is held: 1 GPU is GPU-0, because all others have a free partner

All sets are compared up to 126 sets (as many as nine GPUs have) and nine GPUs a set; beyond that, those that grow from a
GPU of each kind by the strongest links, and the set that is left when the GPUs with the weakest links are removed one by
one; NICs have no influence on what grows. On machines whose links form a hierarchy, such as PCIe switches, and at an
NVSwitch the strongest seam is among these sets.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nsmallest
from itertools import combinations
from math import comb
from operator import itemgetter

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.bandwidth import NO_NICS, Members, Nics, Scores, SetScorer, count_nics, grow_set
from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice

MOST_COMPARED = comb(9, 4)
"""Sets: all there are of nine GPUs."""
MOST_IN_A_SET = 9
"""GPUs of the sets of which all are compared."""
MOST_GROWN = 8
"""Sets that grow whose seam is computed. The minimum cut of 33 of 64 GPUs takes some 10 ms."""


class ByTopology(DevicePolicy):
    """topoalign's own device policy: chooses the set with the best key, by the rule of this module."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the set with the best key that holds all required GPUs."""
        return by_topology(asked.scorer, asked.available, asked.required, asked.size, asked.free, asked.nics)

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains that there are more sets than are compared."""
        others = len(asked.available) - len(asked.required)
        more = asked.size - len(asked.required)
        if compares_all(others, more):
            return ""
        return f", of the sets that grow from each GPU: all {comb(others, more)} are too many to compare"

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that names the first element of the key by which another set lost against this one."""
        sets = SetOrder(asked.scorer, asked.free.union(asked.available), asked.nics)
        return lambda other: sets.difference(other, chosen)


def compares_all(gpus: int, size: int) -> bool:
    """Whether all sets of this size of so many GPUs are compared. The seams of many large sets would take too long."""
    return comb(gpus, size) <= MOST_COMPARED and size <= MOST_IN_A_SET


Rank = tuple[tuple[int, int], tuple[int, int], int, int, Members]


class SetOrder:
    """The order of sets of GPUs that are taken from the free ones."""

    def __init__(self, scorer: SetScorer, free: Iterable[int], nics: Nics = NO_NICS) -> None:
        self.scorer = scorer
        self.nics = nics
        self.free = frozenset(free)
        self.links_to_free = scorer.links_to(self.free)

    def cut(self, members: Members) -> int:
        """The sum of the scores of the links between free members and the free GPUs that are not members."""
        taken = members if self.free.issuperset(members) else tuple(filter(self.free.__contains__, members))
        return sum([self.links_to_free[member] for member in taken]) - 2 * self.scorer.own(taken)

    def rank(self, members: Members) -> Rank:
        """The key that sorts sets of one size, the best first."""
        seam = self.scorer.seam(members)
        local, near = count_nics(self.nics, members)
        return (
            (-seam.fabric_links, -seam.pcie),  # the strongest seam,
            (-local, -near),  # then the most wanted NICs that are local to a member, then near one,
            self.cut(members),  # then the fewest links cut,
            -self.scorer.own(members),  # then the most links of its own,
            members,  # then the lowest indexes
        )

    def first_look(self, members: Members) -> tuple[int, tuple[int, int], int, Members]:
        """The key that sorts sets before their seams are known."""
        local, near = count_nics(self.nics, members)
        return -self.scorer.most_links(members), (-local, -near), self.cut(members), members

    def first(self, sets: Iterable[Members]) -> Members:
        """The first of these sets (at least one). The costly minimum cut is computed only where it may decide."""
        bounds = sorted(((self.scorer.most_links(members), members) for members in sets), reverse=True)
        best: Rank | None = None
        for most, members in bounds:
            if best is not None and most < -best[0][0]:
                break
            rank = self.rank(members)
            best = rank if best is None else min(best, rank)
        assert best is not None, "there is a set"
        return best[-1]

    def difference(self, other: Members, chosen: Members) -> str:
        """Why a set lost against the chosen one."""
        theirs = self.rank(other)
        mine = self.rank(chosen)
        at = next(place for place, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
        match at:
            case 0:
                return f"its seam is {self.scorer.describe(other)}, not {self.scorer.describe(chosen)}"
            case 1:
                return f"{-theirs[1][0]} local and {-theirs[1][1]} near NICs, not {-mine[1][0]} and {-mine[1][1]}"
            case 2:
                return f"cuts links worth {theirs[2]} to GPUs that stay free, not {mine[2]}"
            case 3:
                return f"links of its own worth {-theirs[3]}, not {-mine[3]}"
            case _:
                return "equal, with higher indexes"


def by_topology(
    scorer: SetScorer,
    available: Sequence[int],
    required: Collection[int],
    size: int,
    free: Iterable[int] = (),
    nics: Nics = NO_NICS,
) -> Members:
    """The `size` available positions with the best key. `free`: all GPUs that nobody holds, also where not offered."""
    everything = frozenset((*free, *available))

    def choose() -> Members:
        order = SetOrder(scorer, everything, nics)
        return order.first(candidate_sets(order, available, required, size))

    if nics.wanted:
        return choose()
    return scorer.chosen((Placement.TOPOLOGY, frozenset(available), frozenset(required), size, everything), choose)


def candidate_sets(
    order: SetOrder, available: Sequence[int], required: Collection[int], size: int
) -> Iterable[Members]:
    """The sets to compare, each ascending: all of them, or beyond MOST_COMPARED those that grow well."""
    others = [position for position in sorted(available) if position not in required]
    if compares_all(len(others), size - len(required)):
        if not required:
            return combinations(others, size)
        return (tuple(sorted((*required, *some))) for some in combinations(others, size - len(required)))
    strength = order.scorer.links.strength
    seeds: Iterable[tuple[int, ...]] = [()]
    if len(required) < size:  # one of all GPUs whose links to the available ones have the same strengths
        columns = itemgetter(*available)
        alike = {tuple(sorted(columns(strength[other]))): (other,) for other in reversed(others)}
        seeds = alike.values()
    to_free = order.links_to_free
    sets = {grow_set(strength, others, (*required, *seed), size, to_free) for seed in seeds}
    sets.add(_peel(strength, others, tuple(required), size))
    return nsmallest(MOST_GROWN, sets, key=order.first_look)


def _peel(strength: Scores, among: Iterable[int], required: Members, size: int) -> Members:
    """Removes the GPU with the weakest links to the others, of equals the last, until `size` are left."""
    members = {*among, *required}
    links = {member: sum([strength[member][other] for other in members]) for member in members}
    removable = {member: links[member] for member in sorted(members.difference(required), reverse=True)}
    while len(members) > size:
        removed = min(removable, key=removable.__getitem__)
        del removable[removed]
        members.remove(removed)
        row = strength[removed]
        for other in removable:
            removable[other] -= row[other]
    return tuple(sorted(members))
