"""What hints come to, as the rules are told: one hint of every list at a time, one set of NUMA nodes after the other."""

import random
from collections.abc import Sequence
from itertools import product

from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.topology.bitmask import Mask, masks_by_size, node_mask, nodes_of
from topoalign.core.policy.merge.closest_numa import Distances

Lists = Sequence[Sequence[TopologyHint]]


def preference(mask: Mask, distances: Distances | None) -> tuple[int, float, int]:
    """The fewest nodes, then the closest, then the lowest."""
    inside = nodes_of(mask)
    far = sum(distances[a][b] for a in inside for b in inside) / len(inside) ** 2 if distances else 0.0
    return (len(inside), far, mask)


def cross_product(lists: Lists, machine: Mask, distances: Distances | None) -> TopologyHint:
    """The kubelet's merge."""
    greediest = max(map(width, lists), default=0)
    preferred: list[Mask] = []
    others: list[Mask] = []
    for chosen in product(*lists):
        masks = [hint.affinity for hint in chosen if hint.affinity is not None]
        merged = machine
        for mask in masks:
            merged &= mask
        if merged:
            alike = len({*masks}) <= 1 and all(hint.preferred for hint in chosen)
            (preferred if alike else others).append(merged)
    if preferred:
        return TopologyHint(min(preferred, key=lambda mask: preference(mask, distances)), True)
    within = [mask for mask in others if mask.bit_count() <= greediest]
    widest = max((mask.bit_count() for mask in within), default=0)
    best = [mask for mask in within if mask.bit_count() == widest] or others
    return TopologyHint(min(best, key=lambda mask: preference(mask, distances), default=machine), False)


def narrowest_room(lists: Lists, machine: Mask, distances: Distances | None) -> TopologyHint:
    """The merge of mode `best`: the best set of nodes with room for a hint of each list."""
    met = all(hint.affinity is not None or hint.preferred for hints in lists for hint in hints)
    naming = [[hint.affinity for hint in hints if hint.affinity is not None] for hints in lists if width(hints)]
    if not naming:
        return TopologyHint(None, met)
    room = [
        mask
        for mask in masks_by_size(nodes_of(machine))
        if all(any(not hint & ~mask for hint in hints) for hints in naming)
    ]
    if not room:
        return TopologyHint(machine, False)
    best = min(room, key=lambda mask: preference(mask, distances))
    return TopologyHint(best, met and best.bit_count() == max(map(width, lists)))


def width(hints: Sequence[TopologyHint]) -> int:
    """NUMA nodes of the narrowest hint that names any; 0 if none does."""
    return min((hint.affinity.bit_count() for hint in hints if hint.affinity is not None), default=0)


def uneven(seed: int) -> list[int]:
    """Of each of 64 nodes a little more or less."""
    chance = random.Random(seed)
    return [chance.randint(900, 1000) for _ in range(64)]


def all_but_14(amounts: Sequence[int]) -> int:
    """So much that 50 of 64 nodes can have it, but hardly any 50."""
    most = sorted(amounts, reverse=True)
    return sum(most[:49]) + most[49] * 6 // 10


def knapsack() -> list[HintRule]:
    """Eight resources, each of which some 50 of 64 nodes have: whether any 50 have all of them is hard to say."""
    supplies = [uneven(seed) for seed in range(8)]
    needs = [ResourceNeed(all_but_14(each), {1 << i: amount for i, amount in enumerate(each)}) for each in supplies]
    return [HintRule(nodes=node_mask(range(64)), needs=(need,), least=50) for need in needs]
