"""
Policy `topology`: chooses the set of GPUs on which a collective runs fastest. Of equally fast sets, it chooses the one
that fragments the remaining GPUs least.

Sets are compared by one key, element by element:

1. the weakest seam of the set: the NVLinks between the two parts of its weakest division or, without NVLinks, the PCIe
   path between them. The strongest wins;
2. NICs, if the container requests some: the number that can be local to a member, then the number that can be near one.
   The highest wins;
3. the links that the set cuts: the sum of the scores of all links between its members and the GPUs that stay free. The
   lowest wins, so pairs and groups of free GPUs stay complete for the next container;
4. the links within the set: the sum of the scores of all links among its members. The highest wins;
5. the lowest indexes.

    8 GPUs at an NVSwitch with 18 NVLinks each, but GPU-0 has none
    a request for 4 GPUs: GPU-1, GPU-2, GPU-3 and GPU-4, never GPU-0, because of the seam
    a request for 1 GPU: GPU-0, because it cuts no NVLink
    4 linked pairs, GPU-1 is held: a request for 1 GPU gets GPU-0, because all others have a free partner

All sets are compared if there are at most 126 (the sets of four of nine GPUs), of at most nine GPUs each. Otherwise,
these sets are compared: the sets that grow by the strongest links, one from a GPU of each kind, and the set that
remains when the GPUs with the weakest links are removed one by one. NICs do not influence these sets. If the machine's
links form a hierarchy, such as PCIe switches, or go through an NVSwitch, the set with the strongest seam is among them.
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
"""Maximum number of sets of which all are compared: the sets of four of nine GPUs."""
MOST_IN_A_SET = 9
"""Maximum number of GPUs in a set if all sets are compared."""
MOST_GROWN = 8
"""Maximum number of grown sets whose seam is computed. The minimum cut of 33 of 64 GPUs takes about 10 ms."""


class ByTopology(DevicePolicy):
    """topoalign's own device policy: chooses the set with the best key, by the rule of this module."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the set with the best key that has all required GPUs."""
        return by_topology(asked.scorer, asked.available, asked.required, asked.size, asked.free, asked.nics)

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains that there are too many sets to compare all. Empty: all sets are compared."""
        others = len(asked.available) - len(asked.required)
        more = asked.size - len(asked.required)
        if compares_all(others, more):
            return ""
        return f", of the sets that grow from each GPU: all {comb(others, more)} are too many to compare"

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that names the first element of the key by which another set lost against `chosen`."""
        sets = SetOrder(asked.scorer, asked.free.union(asked.available), asked.nics)
        return lambda other: sets.difference(other, chosen)


def compares_all(gpus: int, size: int) -> bool:
    """Whether all sets of this size of `gpus` GPUs are compared. The seams of many large sets would take too long."""
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
            -self.scorer.own(members),  # then the most links within the set,
            members,  # then the lowest indexes
        )

    def first_look(self, members: Members) -> tuple[int, tuple[int, int], int, Members]:
        """The key that sorts sets before their seams are known."""
        local, near = count_nics(self.nics, members)
        return -self.scorer.most_links(members), (-local, -near), self.cut(members), members

    def first(self, sets: Iterable[Members]) -> Members:
        """The first of these sets (at least one). The expensive minimum cut is computed only if it can decide."""
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
    """The `size` available positions with the best key. `free`: all GPUs that no container holds, available or not."""
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
    """The sets to compare, each ascending: all sets or, if these are too many, the best grown sets."""
    others = [position for position in sorted(available) if position not in required]
    if compares_all(len(others), size - len(required)):
        if not required:
            return combinations(others, size)
        return (tuple(sorted((*required, *some))) for some in combinations(others, size - len(required)))
    strength = order.scorer.links.strength
    seeds: Iterable[tuple[int, ...]] = [()]
    if len(required) < size:  # one GPU of each group whose links to the available GPUs have the same strengths
        columns = itemgetter(*available)
        alike = {tuple(sorted(columns(strength[other]))): (other,) for other in reversed(others)}
        seeds = alike.values()
    to_free = order.links_to_free
    sets = {grow_set(strength, others, (*required, *seed), size, to_free) for seed in seeds}
    sets.add(_peel(strength, others, tuple(required), size))
    return nsmallest(MOST_GROWN, sets, key=order.first_look)


def _peel(strength: Scores, among: Iterable[int], required: Members, size: int) -> Members:
    """Removes the GPU with the weakest links to the others, of equal ones the last, until `size` GPUs remain."""
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
