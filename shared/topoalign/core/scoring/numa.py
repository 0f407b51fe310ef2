"""
Scores nodes by the free resources of their NUMA nodes, like the scheduler plugin NodeResourceTopologyMatch: 0 to 100.

`least-allocated`, `most-allocated` and `balanced` score each NUMA node separately. So they apply only to nodes with
policy `single-numa-node`; other nodes get 0. A NUMA node on which the request does not fit has score 0. A node gets the
lowest score of its NUMA nodes on which the request fits, whichever the kubelet chooses. In scope `container`, a pod
gets the mean over its containers. Otherwise, it gets the score of its effective request. Scores are rounded down.

    2 CPUs and 20 MiB on a NUMA node with 4 free CPUs and 500 MiB of free memory
    least-allocated: 50 % of the CPUs and 96 % of the memory would stay free: (50 + 96) / 2 = 73
    most-allocated: (50 + 4) / 2 = 27
    balanced: the fractions 0.5 and 0.04 have the sample variance 0.1058: 89

`least-numa-nodes` counts the needed NUMA nodes, under any policy. The score is 100, minus 12 for each needed NUMA node,
plus 6 if no other set of the same size has a lower mean distance. 12 is 100 divided by the maximum number of NUMA nodes
that the kubelet allows. Of the sets with enough free resources, the one with the lowest mean distance is used; of equal
sets, the first. Later containers can use what then remains free. An unknown distance counts as 255. On a machine with
more than 16 NUMA nodes, not all sets are compared, so the score can be 0.

    1 NUMA node 94; 2 near ones 82; 2 far ones 76; fits on no set 0; requests no resource of NUMA nodes 100

For a pod that is not Guaranteed, all nodes are equal: 100. Source: scheduler-plugins 903da7df, noderesourcetopology.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache, partial
from itertools import combinations
from math import comb
from typing import NamedTuple

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.resource_quantities import Quantities, effective_requests, pod_wide
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import Policy, Scope
from topoalign.core.numa_sets.subsets import fewest_with
from topoalign.core.policy import POLICIES
from topoalign.core.scoring.zones import Amounts, Zone

BEST = 100
FARTHEST = 255
"""The distance that replaces an unknown one. In ACPI SLIT, it means unreachable."""
MOST_SETS = 12_870
"""
Maximum number of sets of NUMA nodes of one size that are compared: all sets of 8 of 16 nodes. They are listed once for
machines of one model, in 80 ms.
"""


class NumaScore(StrEnum):
    """Scores by the free resources of NUMA nodes."""

    LEAST_ALLOCATED = "least-allocated"
    """Nodes on which the most stays free come first: pods are spread."""
    MOST_ALLOCATED = "most-allocated"
    """Nodes on which the least stays free come first: pods are packed."""
    BALANCED = "balanced"
    """Nodes on which the pod uses equal fractions of all resources come first, so that none runs out early."""
    LEAST_NUMA_NODES = "least-numa-nodes"
    """Nodes on which the pod needs the fewest NUMA nodes come first."""


class NumaNeed(NamedTuple):
    """The properties of a pod and of the rules of a node's kubelet that these scores depend on."""

    policy: str
    scope: str
    most_nodes: int
    """The maximum number of NUMA nodes that the kubelet allows."""
    guaranteed: bool
    containers: tuple[Quantities, ...]
    """The requests of each container, init containers first; CPUs in millicores, memory in bytes."""
    whole: Quantities
    """The effective request of the pod."""


def numa_need(demand: PodDemand) -> NumaNeed:
    """The need of a pod under the rules of a node."""
    return NumaNeed(
        demand.rules.policy,
        demand.rules.scope,
        demand.rules.max_allowable_numa_nodes,
        demand.request.gets_exclusive_resources,
        tuple(each.asked for each in demand.containers),
        pod_wide(demand.request, effective_requests),
    )


def numa_score(kind: NumaScore, need: NumaNeed, zones: Sequence[Zone]) -> int:
    """The score, 0 to 100, of a node with these NUMA nodes."""
    if not need.guaranteed:
        return BEST
    by_pod = need.scope == Scope.POD
    if kind is NumaScore.LEAST_NUMA_NODES:
        return _fewest_nodes((need.whole,) if by_pod else need.containers, zones, need.most_nodes)
    if not POLICIES[Policy(need.policy)].single_node:
        return 0
    score = STRATEGIES[kind]
    parts = (need.whole,) if by_pod else need.containers
    # the lowest score of the NUMA nodes that fit; 0 if none does
    lowest = [min(filter(None, (score(part, zone.available) for zone in zones)), default=0) for part in parts]
    return sum(lowest) // len(parts)


Strategy = Callable[[Quantities, Amounts], int]
"""(requests, free amounts of a NUMA node) -> score. 0 if the requests do not fit."""


def _allocated(wanted: Quantities, left: Amounts, *, most: bool) -> int:
    """The mean percentage of the requested resources that is used (`most`) or that stays free, rounded down."""
    shares = []
    for name, amount in wanted.items():
        has = left.get(name, 0)
        counted = amount if most else has - amount
        shares.append(counted * BEST // has if has and amount <= has else 0)  # 0: too little is free
    return sum(shares) // len(shares) if shares else BEST


def _balanced(wanted: Quantities, left: Amounts) -> int:
    """100 * (1 - sample variance of the used fractions of the requested resources). A single resource is balanced."""
    if any(amount > left.get(name, 0) for name, amount in wanted.items()):
        return 0
    shares = [amount / left[name] for name, amount in wanted.items() if left.get(name)]
    if len(shares) < 2:
        return BEST
    average = sum(shares) / len(shares)
    variance = sum((share - average) ** 2 for share in shares) / (len(shares) - 1)
    return int((1 - variance) * BEST)


STRATEGIES: Mapping[NumaScore, Strategy] = {
    NumaScore.LEAST_ALLOCATED: partial(_allocated, most=False),
    NumaScore.MOST_ALLOCATED: partial(_allocated, most=True),
    NumaScore.BALANCED: _balanced,
}
"""The scores that are computed for each NUMA node separately."""


def _fewest_nodes(parts: Iterable[Quantities], zones: Sequence[Zone], most_nodes: int) -> int:
    """The score of the largest set of NUMA nodes that a part needs. The parts use up resources in their order."""
    left = [dict(zone.available) for zone in zones]
    bound = {name for zone in zones for name in zone.available}
    apart = tuple(tuple(one.costs.get(other.id, FARTHEST) for other in zones) for one in zones)
    most = 0
    near = True
    for part in parts:
        if bound.isdisjoint(part):
            continue
        found = _smallest_numa_set([each for each in part.items() if each[1]], left, apart)
        if found is None:
            return 0
        members, nearest = found
        most = max(most, len(members))
        near = near and nearest
        for name, amount in part.items():  # from each node as much as it has, in the order of the nodes
            for member in members:
                taken = min(amount, left[member].get(name, 0))
                if taken:
                    left[member][name] -= taken
                    amount -= taken
    unit = BEST // most_nodes
    return max(0, BEST - most * unit + (unit // 2 if near else 0)) if most else BEST


Distances = tuple[tuple[int, ...], ...]
"""Row and column i belong to the i-th NUMA node."""
Members = tuple[int, ...]
"""NUMA nodes by their positions, ascending."""


def _smallest_numa_set(
    needs: Sequence[tuple[ResourceName, int]], left: Sequence[Amounts], apart: Distances
) -> tuple[Members, bool] | None:
    """
    Of the smallest sets that have enough, the one with the lowest distances, and whether no set of its size has lower
    ones. None: no set was found.
    """
    # for each resource, the minimum number of NUMA nodes: those with the most of it
    least = (fewest_with((each.get(name, 0) for each in left), amount) or len(left) + 1 for name, amount in needs)
    for size in range(max((1, *least)), len(left) + 1):
        if comb(len(left), size) > MOST_SETS:
            return None
        sets = _nearest_first(apart, size)
        for away, members in sets:
            if all(sum([left[i].get(name, 0) for i in members]) >= amount for name, amount in needs):
                return members, away == sets[0][0]
    return None


@lru_cache(maxsize=64)  # machines of one model have the same distances
def _nearest_first(apart: Distances, size: int) -> tuple[tuple[int, Members], ...]:
    """The sets of `size` NUMA nodes, each with the sum of its distances: by this sum, then the lowest set first."""
    sets = combinations(range(len(apart)), size)
    return tuple(sorted((sum(apart[i][j] for i in members for j in members), members) for members in sets))
