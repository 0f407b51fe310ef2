"""
Scores nodes by what their NUMA nodes have left, as the scheduler plugin NodeResourceTopologyMatch does: 0 to 100.

`least-allocated`, `most-allocated` and `balanced` look at each NUMA node alone, and so only at nodes with policy
`single-numa-node`; another node gets 0. A NUMA node that does not fit has the score 0, and a node the lowest score of its
NUMA nodes that fit, whichever the kubelet will take. In scope `container` a pod gets the mean over its containers, else the
score of what the pod needs at once. Numbers are rounded down.

    2 CPUs and 20 MiB on a NUMA node with 4 CPUs and 500 MiB left
    least-allocated: 50 of the CPUs and 96 of the memory would be left: (50 + 96) / 2 = 73
    most-allocated: (50 + 4) / 2 = 27
    balanced: the shares 0.5 and 0.04 have the sample variance 0.1058: 89

`least-numa-nodes` counts the NUMA nodes that are needed, under any policy: 100, less 12 for each of them, and 6 more if no
other set of as many is nearer together on average; 12 is 100 divided by the most NUMA nodes that the kubelet allows. Of the
sets that fit the nearest is taken, of equals the first, and later containers have what it leaves. A distance that is not
known is 255. Of a machine with more than 16 NUMA nodes not all sets are compared, and it may get 0.

    1 NUMA node 94; 2 near ones 82; 2 far ones 76; fits on no set 0; asks for nothing that a NUMA node has 100

Every node is equal for a pod that is not Guaranteed: 100. Source: scheduler-plugins 903da7df, noderesourcetopology.
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
"""Distance of NUMA nodes of which none is known; ACPI SLIT calls it unreachable."""
MOST_SETS = 12_870
"""Sets of NUMA nodes of one size: all there are of 16 nodes. They are listed once for machines of one model, in 80 ms."""


class NumaScore(StrEnum):
    """Scores by what NUMA nodes have left."""

    LEAST_ALLOCATED = "least-allocated"
    """Nodes on which much stays free first: pods are spread."""
    MOST_ALLOCATED = "most-allocated"
    """Nodes on which little stays free first: pods are packed."""
    BALANCED = "balanced"
    """Nodes first of whose resources the pod takes equal shares, so that none runs out before the others."""
    LEAST_NUMA_NODES = "least-numa-nodes"
    """Nodes first on which the pod needs the fewest NUMA nodes."""


class NumaNeed(NamedTuple):
    """What of a pod and of the rules of a node's kubelet these scores depend on."""

    policy: str
    scope: str
    most_nodes: int
    """The most NUMA nodes that the kubelet allows."""
    guaranteed: bool
    containers: tuple[Quantities, ...]
    """What each container requests, init containers first; CPUs in millicores, memory in bytes."""
    whole: Quantities
    """What the pod needs at once."""


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
    """The score, 0 to 100, of a node whose NUMA nodes have `Zone.available` left."""
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
"""The score of what is requested on a NUMA node that has so much left; 0 where it does not fit."""


def _allocated(wanted: Quantities, left: Amounts, *, most: bool) -> int:
    """The mean share, in percent, that is taken of each resource that is requested, or stays free; rounded down."""
    shares = []
    for name, amount in wanted.items():
        has = left.get(name, 0)
        counted = amount if most else has - amount
        shares.append(counted * BEST // has if has and amount <= has else 0)  # 0: it is too little
    return sum(shares) // len(shares) if shares else BEST


def _balanced(wanted: Quantities, left: Amounts) -> int:
    """100 where equal shares of all resources are taken, less their sample variance; a single resource is balanced."""
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
"""The scores that look at each NUMA node alone."""


def _fewest_nodes(parts: Iterable[Quantities], zones: Sequence[Zone], most_nodes: int) -> int:
    """The score of the largest set of NUMA nodes that a part needs; the parts take what they need in their order."""
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
        for name, amount in part.items():  # from each node as much as it has, in their order
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
    """The nearest of the smallest sets that have it together, and whether it alone is so near. None: none is found."""
    # so many NUMA nodes are needed at least: those that have most of each resource
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
    """The sets of so many NUMA nodes, each with the sum of its distances; the nearest first, then the lowest."""
    sets = combinations(range(len(apart)), size)
    return tuple(sorted((sum(apart[i][j] for i in members for j in members), members) for members in sets))
