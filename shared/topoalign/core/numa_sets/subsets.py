"""
Lists every subset of a few NUMA nodes, in the kubelet's order: by size, then by the positions of the nodes.

Subsets are numbered: bit i of a number is the i-th node. The sums of all subsets are computed by doubling a list once
per node, which takes microseconds for 2^8 subsets. More than 12 nodes are refused. A `HintRule` is expanded to hints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, compress

from topoalign.core.model.errors import NoFit
from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.topology.bitmask import Mask, nodes_of, union

MOST_NODES = 12
"""12 nodes have 4,096 subsets, which take a few milliseconds. By default, the kubelet allows at most 8 nodes."""


class TooManyNumaNodes(NoFit):
    """
    Raised when the machine has more NUMA nodes than the kubelet accepts.

    Also raised when there are too many to list their subsets.

    Remedy: Raise `max-allowable-numa-nodes` of the kubelet.
    """


@dataclass(frozen=True)
class Subsets:
    """The subsets of some NUMA nodes, by number: bit i of a number is the i-th node."""

    nodes: tuple[int, ...]
    masks: tuple[Mask, ...]
    order: tuple[int, ...]
    """The numbers of the non-empty subsets in the kubelet's order."""
    numbers: Mapping[Mask, int]


@lru_cache(maxsize=256)
def subsets(nodes: tuple[int, ...]) -> Subsets:
    """Lists the subsets of these NUMA nodes. Raises TooManyNumaNodes for more than MOST_NODES nodes."""
    if len(nodes) > MOST_NODES:
        raise TooManyNumaNodes(
            f"{len(nodes)} NUMA nodes take part, and their subsets are listed for at most {MOST_NODES}",
            "ask for resources that are on fewer NUMA nodes, or use a coarser NUMA setting of the firmware (NPS, SNC)",
        )
    bits = [1 << position for position in range(len(nodes))]
    order = tuple(sum(chosen) for size in range(1, len(bits) + 1) for chosen in combinations(bits, size))
    masks = tuple(sums_by_subset(1 << node for node in nodes))
    return Subsets(nodes, masks, order, {mask: number for number, mask in enumerate(masks)})


def sums_by_subset(amounts: Iterable[int]) -> list[int]:
    """The sum over each subset, computed from the amounts of the nodes: [a, b] gives [0, a, b, a + b]."""
    sums = [0]
    for amount in amounts:
        sums += [amount + smaller for smaller in sums]
    return sums


def fewest_with(amounts: Iterable[int], needed: int) -> int | None:
    """The minimum number of these amounts whose sum is at least `needed`, at least 1. None: the sum of all is less."""
    sums = accumulate(sorted(amounts, reverse=True))
    return next((count for count, total in enumerate(sums, 1) if total >= needed), None)


def hints_of_rule(rule: HintRule) -> tuple[TopologyHint, ...]:
    """The hints of a rule, in the kubelet's order. Raises TooManyNumaNodes."""
    everywhere = union((rule.nodes, *rule.besides))
    space = subsets(nodes_of(everywhere))
    enough = [list(map(need.amount.__le__, totals_by_subset(space.nodes, space.masks, need))) for need in rule.needs]
    if everywhere != rule.nodes or not enough:
        enough.append([not mask & ~rule.nodes for mask in space.masks])
    fits = list(map(all, zip(*enough, strict=True))) if len(enough) > 1 else enough[0]
    for mask in rule.besides:
        fits[space.numbers[mask]] = True
    return tuple(compress(_every_hint(space.nodes, rule.least), map(fits.__getitem__, space.order)))


@lru_cache(maxsize=64)
def _every_hint(nodes: tuple[int, ...], least: int) -> tuple[TopologyHint, ...]:
    """All subsets of these nodes as hints, in the kubelet's order. Those with `least` nodes are preferred."""
    space = subsets(nodes)
    return tuple(TopologyHint(space.masks[number], number.bit_count() == least) for number in space.order)


def totals_by_subset(nodes: tuple[int, ...], masks: tuple[Mask, ...], need: ResourceNeed) -> list[int]:
    """The supply of each subset for the need, by the subset's number."""
    counts = sums_by_subset(need.supply.get(1 << node, 0) for node in nodes)
    for near, amount in need.supply.items():
        if near.bit_count() > 1:
            counts = [had + amount if mask & near else had for had, mask in zip(counts, masks, strict=True)]
    return counts
