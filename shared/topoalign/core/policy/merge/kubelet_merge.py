"""
Merges the hints of all providers as the kubelet does. All resources of a container are aligned to the result.

The rule (kubelet v1.36.3, topologymanager): a candidate is the AND of the masks of one hint from each list. It is
preferred only if all its hints are preferred and have the same mask. The best candidate is the narrowest preferred one.
If none is preferred, it is the widest one with at most B NUMA nodes or, if there is none, the narrowest of all. Each
list has a narrowest hint; B is the largest NUMA node count of these (kubelet: `BestNonPreferredAffinityCount`).

The kubelet tries all combinations of hints: 10^12 for 5 resources on 8 NUMA nodes. The same result needs less work:

- A mask is a preferred candidate only if every list has a preferred hint that has this mask or is for any node. For
  lists, an intersection of sets finds these masks. For rules (`HintRule`), a search finds them.
- If no candidate is preferred, only the set of all candidate masks matters. A combination has an AND that contains the
  mask m if each of its masks contains m. So the number of these combinations is a product: for each list, how many of
  its masks contain m. Subtracting the combinations whose AND contains more than m leaves those whose AND is exactly m.
  If any are left, m is a candidate. Both steps are sums over supersets (`_over_supersets`).
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
    """
    Turns the providers' answers into offers. No opinion becomes a preferred hint for any node, and an empty list
    becomes a non-preferred hint for any node.
    """
    return [
        each for provider in providers for each in (map(offer_of_hints, provider.values()) if provider else ((ANY,),))
    ]


def offer_of_hints(hints: Hints) -> tuple[TopologyHint, ...] | HintRule:
    """The offer for the hints of one resource: if None, `ANY`; if (), `NO_AFFINITY`; otherwise the hints themselves."""
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
    """The best mask that all offers prefer, or None. An offer with a preferred hint for any node prefers every mask."""
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
    With `add`, returns for each subset the sum over all its supersets (zeta transform). With `sub`, reverses this
    (Moebius transform). Each pass handles the node of the lowest bit: it combines each subset without this node with
    the same subset plus this node, and moves the bit to the top. After all passes, the order is the original one.
    """
    for _ in range(len(values).bit_length() - 1):
        having = values[1::2]
        values = [*map(combine, values[::2], having), *having]
    return values
