"""
Combines lists and rules of hints: every combination of one hint of each, as far as the hints are listed.

What a rule offers is not listed, so a combination names the rules that take part as such, and the mask that the listed
hints of the others come to. Equal combinations count once, so there are at most as many as masks, and not their
product.
"""

from collections.abc import Callable, Sequence

from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import Choosing, NumaSearchBudget

Offer = Sequence[TopologyHint] | HintRule
"""The hints of one resource, as a list or as a rule."""

Combination = tuple[frozenset[int], Mask]
"""Positions of the rules that take part, and what the listed hints of all others come to."""


def combinations(
    offers: Sequence[Offer], start: Mask, join: Callable[[Mask, Mask], Mask], work: NumaSearchBudget
) -> set[Combination]:
    """All combinations of one hint of each offer, where `join` puts two masks together. Raises TooMuchWork."""
    found: set[Combination] = {(frozenset(), start)}
    for position, offer in enumerate(offers):
        following: set[Combination] = set()
        is_rule = isinstance(offer, HintRule)
        listed = {*offer.besides} if isinstance(offer, HintRule) else {hint.affinity for hint in offer}
        for rules, mask in found:
            for each in listed:
                work.step()
                following.add((rules, mask if each is None else join(mask, each)))
            if is_rule:
                following.add((rules | {position}, mask))
        found = following
    return found


def narrowest_width(offer: Offer, work: NumaSearchBudget | None = None) -> int:
    """The number of NUMA nodes of the narrowest hint that names any; 0 if none does. Raises TooMuchWork."""
    if not isinstance(offer, HintRule):
        return min(map(int.bit_count, [mask for hint in offer if (mask := hint.affinity) is not None]), default=0)
    widths = [mask.bit_count() for mask in offer.besides]
    family = Choosing(offer.nodes, offer.needs, work or NumaSearchBudget()).least_size()
    return min(widths if family is None else [*widths, family], default=0)
