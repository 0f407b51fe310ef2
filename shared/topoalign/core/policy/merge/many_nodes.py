"""
Merges hints as the kubelet does on machines with so many NUMA nodes that hints come as rules.

The rule is that of `merge`, and so is its result. A mask is preferred if every rule and list prefers it: a search meets the
needs of all rules at once. If there is none, no hint is merged as preferred, and what the hints can come to is given by
`RuleIntersectionSearch` for the rules and by `combinations` for the lists.
"""

from collections.abc import Sequence
from functools import reduce
from operator import and_

from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import Choosing, NumaSearchBudget, mask_meets_needs
from topoalign.core.policy.merge.closeness import Distances, choose_narrowest_mask, closest
from topoalign.core.policy.merge.hint_combinations import Offer, combinations, narrowest_width
from topoalign.core.policy.merge.rule_intersections import RuleIntersectionSearch


def merge_many_nodes(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> TopologyHint:
    """The best hint that the offers have in common; the whole machine, not preferred, if none. Raises TooMuchWork."""
    preferred = _preferred_mask(offers, machine, distances, work)
    if preferred is not None:
        return TopologyHint(preferred, True)
    common = _common_mask(offers, machine, distances, work)
    return TopologyHint(machine if common is None else common, False)


def _preferred_mask(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> Mask | None:
    """The best mask that all offers prefer; None if there is none."""
    rules = [offer for offer in offers if isinstance(offer, HintRule)]
    lists = [{hint.affinity for hint in offer if hint.preferred} for offer in offers if not isinstance(offer, HintRule)]
    named = {mask for each in lists for mask in each} | {mask for rule in rules for mask in rule.besides}
    masks = [
        mask & machine
        for mask in named
        if mask is not None
        and mask & machine
        and all(mask in each or None in each for each in lists)
        and all(_prefers(rule, mask) for rule in rules)
    ]
    sizes = {rule.least for rule in rules}
    if rules and len(sizes) == 1 and all(None in each for each in lists):
        size = sizes.pop()
        choosing = Choosing(reduce(and_, (rule.nodes for rule in rules)), [n for r in rules for n in r.needs], work)
        found = closest(choosing.masks, choosing.nodes, size, distances)
        masks += [found] if found else []
    if not rules and all(None in each for each in lists):
        masks.append(machine)
    return choose_narrowest_mask(masks, distances) if masks else None


def _prefers(rule: HintRule, mask: Mask) -> bool:
    family = not mask & ~rule.nodes and mask_meets_needs(rule.needs, mask)
    return mask.bit_count() == rule.least and (mask in rule.besides or family)


def _common_mask(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> Mask | None:
    """The best AND of one hint of each offer, where none is preferred; None if there is none."""
    greediest = max((narrowest_width(offer, work) for offer in offers), default=0)
    masks = []
    families = []
    for rules, mask in combinations(offers, machine, and_, work):
        members = [offer for i, offer in enumerate(offers) if i in rules and isinstance(offer, HintRule)]
        if members and mask:
            families.append(RuleIntersectionSearch(members, mask, work))
        elif mask:
            masks.append(mask)
    sizes = [mask.bit_count() for mask in masks if mask.bit_count() <= greediest]
    sizes += [size for each in families if (size := each.size_within(greediest)) is not None]
    if sizes:
        size = max(sizes)
    else:
        sizes = [mask.bit_count() for mask in masks]
        sizes += [least for each in families if (least := each.least_size()) is not None]
        size = min(sizes, default=0)
    masks = [mask for mask in masks if mask.bit_count() == size]
    masks += [found for each in families if (found := closest(each.masks, each.nodes, size, distances)) is not None]
    return choose_narrowest_mask(masks, distances) if masks else None
