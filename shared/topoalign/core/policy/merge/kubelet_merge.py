"""
Merges the providers' hints, as the kubelet does, into the one to which everything of a container is aligned.

The rule (kubelet v1.36.3, topologymanager): take one hint of every list and AND their masks; that is a candidate, and it is
preferred only if all its hints are and their masks are equal. The best candidate is the narrowest preferred one. If there
is none, it is the widest that does not exceed B, the width of the greediest resource's narrowest hint; if there is none
either, the narrowest of all.

The kubelet walks through all combinations, of which 8 NUMA nodes and 5 resources have 10^12. The same result is computed
with less work:

- A candidate is preferred only where every list has that very mask as a preferred hint, or a preferred hint for any node:
  intersecting sets finds these, and a search finds those of rules.
- Otherwise only the set of AND masks counts. For a mask m, the combinations whose AND contains m number the product over
  the lists of "hints that contain m"; taking from that the combinations whose AND is larger leaves those whose AND is m.
  Both steps are sums over supersets.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from itertools import islice
from operator import add, and_, mul, sub

from topoalign.core.model.hints import HintRule, Hints, ProviderHints, TopologyHint
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, nodes_of, union
from topoalign.core.numa_sets.search import Choosing, NumaSearchBudget, mask_meets_needs
from topoalign.core.numa_sets.subsets import hints_of_rule, subsets
from topoalign.core.policy.merge.closest_numa import Distances, choose_narrowest_mask

Offer = Sequence[TopologyHint] | HintRule
"""The hints of one resource, as a list or as a rule."""

ANY = TopologyHint(None, True)
NO_AFFINITY = TopologyHint(None, False)


def offers_of_providers(providers: Iterable[ProviderHints]) -> list[tuple[TopologyHint, ...] | HintRule]:
    """Turns the providers' answers into offers: no opinion is any node, preferred; an empty list any, not preferred."""
    return [
        each for provider in providers for each in (map(offer_of_hints, provider.values()) if provider else ((ANY,),))
    ]


def offer_of_hints(hints: Hints) -> tuple[TopologyHint, ...] | HintRule:
    """The offer that hints of one resource stand for: any node, preferred for None and not preferred for ()."""
    return (ANY,) if hints is None else hints or (NO_AFFINITY,)


def merge(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None = None, work: NumaSearchBudget | None = None
) -> TopologyHint:
    """
    The best hint that the offers have in common; the whole machine, not preferred, if none. Raises TooMuchWork, and
    TooManyNumaNodes if no hint is preferred by all and the offers are about too many NUMA nodes to be listed.
    """
    preferred = _preferred_mask(offers, machine, distances, work or NumaSearchBudget())
    if preferred is not None:
        return TopologyHint(preferred, True)
    lists = [hints_of_rule(offer) if isinstance(offer, HintRule) else offer for offer in offers]
    named = [{EVERYWHERE if hint.affinity is None else hint.affinity for hint in hints} for hints in lists]
    candidates = common(named, machine)
    if not candidates:
        return TopologyHint(machine, False)
    greediest = max(map(narrowest_width, lists))
    within = [mask for mask in candidates if mask.bit_count() <= greediest]
    widest = max((mask.bit_count() for mask in within), default=0)
    chosen = [mask for mask in within if mask.bit_count() == widest] or candidates
    return TopologyHint(choose_narrowest_mask(chosen, distances), False)


def narrowest_width(hints: Sequence[TopologyHint]) -> int:
    """The number of NUMA nodes of the narrowest hint that names any; 0 if none does."""
    return min((hint.affinity.bit_count() for hint in hints if hint.affinity is not None), default=0)


def _preferred_mask(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> Mask | None:
    """The best mask that each offer prefers, or where it prefers any node; None if there is none."""
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
    if all(None in each for each in lists):
        sizes = {rule.least for rule in rules}
        if not rules:
            masks.append(machine)
        elif len(sizes) == 1:
            nodes = reduce(and_, (rule.nodes for rule in rules))
            choosing = Choosing(nodes, [need for rule in rules for need in rule.needs], work)
            lowest_first = choosing.masks(sizes.pop())
            masks += islice(lowest_first, None if distances is not None else 1)
    return choose_narrowest_mask(masks, distances) if masks else None


def _prefers(rule: HintRule, mask: Mask) -> bool:
    meets = not mask & ~rule.nodes and mask_meets_needs(rule.needs, mask)
    return mask.bit_count() == rule.least and (mask in rule.besides or meets)


def common(named: Sequence[Collection[Mask]], machine: Mask) -> list[Mask]:
    """Every non-empty mask that is the AND of one mask of each list and the machine. Raises TooManyNumaNodes."""
    if not all(named):
        return []
    narrowing = [masks for masks in named if any(mask != EVERYWHERE for mask in masks)]
    if not narrowing:
        return [machine]
    everywhere = reduce(and_, map(union, narrowing), machine)
    space = subsets(nodes_of(everywhere))
    combinations = [1] * len(space.masks)
    for masks in narrowing:
        offered = {mask & everywhere for mask in masks}
        containing = _over_supersets(list(map(offered.__contains__, space.masks)), add)
        combinations = list(map(mul, combinations, containing))
    exactly = _over_supersets(combinations, sub)
    return [mask for mask, number in zip(space.masks, exactly, strict=True) if mask and number]


def _over_supersets(values: list[int], combine: Callable[[int, int], int]) -> list[int]:
    """
    With `add`, gives each subset the sum over all its supersets; with `sub`, takes that back. One pass per node combines
    each subset without the node with the one that has it, and leaves the lowest node as the highest; after all passes the
    subsets are in their first order.
    """
    for _ in range(len(values).bit_length() - 1):
        having = values[1::2]
        values = [*map(combine, values[::2], having), *having]
    return values
