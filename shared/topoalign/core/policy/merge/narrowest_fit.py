"""
Merges hints as topoalign does (mode `best`): to the narrowest NUMA nodes on which everything fits.

A container fits on a set of NUMA nodes if each of its resources has a hint that is a subset of it. The smallest set
wins, then the one with the best connected GPUs (`MaskOrder`), then the one whose nodes are closest to one another, then
the lowest. The result is preferred if it has as many nodes as the narrowest hint of the resource that needs the most
nodes, because then no smaller set can fit.

In the kubelet's merge, a hint is preferred only if all resources prefer exactly the same nodes. For a pod with one GPU
and with CPUs of two nodes, there are no such nodes. So the kubelet's `restricted` refuses it even on an empty machine.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice, repeat

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.topology.bitmask import Mask, nodes_of, union
from topoalign.core.numa_sets.search import Choosing, NumaSearchBudget
from topoalign.core.numa_sets.subsets import MOST_NODES, Subsets, hints_of_rule, subsets
from topoalign.core.policy.merge.closest_numa import Distances, MaskOrder, choose_narrowest_mask
from topoalign.core.policy.merge.kubelet_merge import Offer, narrowest_width

MOST_COMPARED = 64
"""Maximum number of equally narrow masks that one search finds, the lowest first. The best one is chosen."""


def narrowest_fit(
    offers: Sequence[Offer],
    machine: Mask,
    distances: Distances | None = None,
    work: NumaSearchBudget | None = None,
    order: MaskOrder | None = None,
) -> TopologyHint:
    """
    Returns a hint with the narrowest mask that contains a hint of each offer. If there is no such mask, the hint is for
    the whole machine and not preferred. If no offer names a NUMA node, it is for any node. With more than MOST_NODES
    NUMA nodes, only the lowest MOST_COMPARED masks of each search are compared. Raises TooMuchWork if the narrowest
    mask is not found within the limit on work.
    """
    work = work or NumaSearchBudget()
    offers = [
        hints_of_rule(offer)
        if isinstance(offer, HintRule) and union((offer.nodes, *offer.besides)).bit_count() <= MOST_NODES
        else offer
        for offer in offers
    ]
    widths = [_width_of(offer, work) for offer in offers]
    naming = [offer for offer, width in zip(offers, widths, strict=True) if width]
    if not naming:
        return TopologyHint(None, all(map(_places_request, offers)))
    listed = [_masks_of(offer) for offer in naming]
    named = union(chain.from_iterable(listed))
    if not any(isinstance(offer, HintRule) for offer in naming) and (named & machine).bit_count() <= MOST_NODES:
        masks = _listed_fits(listed, subsets(nodes_of(named & machine)))
    else:
        most = 1 if distances is None and order is None else MOST_COMPARED
        masks = _searched_fits(naming, machine, work, most)
    if not masks:
        return TopologyHint(machine, False)
    mask = choose_narrowest_mask(masks, distances, order)
    return TopologyHint(mask, mask.bit_count() == max(widths) and all(map(_places_request, offers)))


def _places_request(offer: Offer) -> bool:
    """Whether the request can be placed at all: the offer is not just `NO_AFFINITY`, which stands for an empty list."""
    return isinstance(offer, HintRule) or any(hint.affinity is not None or hint.preferred for hint in offer)


def _masks_of(offer: Offer) -> set[Mask]:
    """The masks that an offer lists; {0}, which lies within any mask, where one of its hints is for any node."""
    if isinstance(offer, HintRule):
        return {*offer.besides}
    masks = {hint.affinity or 0 for hint in offer}
    return {0} if 0 in masks else masks


def _listed_fits(listed: Sequence[set[Mask]], space: Subsets) -> list[Mask]:
    """The narrowest masks that contain a mask of each of these sets."""
    # A set of masks is one number: bit n stands for subset n, so that adding a node to all its masks is a shift.
    without, sized = _lattice(len(space.nodes))
    bits = _bit_of_each(space.nodes)
    fitting = -1
    for masks in listed:
        held = sum(map(bits.get, masks, repeat(0)))
        for node, lacking in enumerate(without):
            held |= (held & lacking) << (1 << node)
        fitting &= held
    found = next((fitting & each for each in sized if fitting & each), 0)
    return [space.masks[number] for number in nodes_of(found)]


@lru_cache(maxsize=8)
def _bit_of_each(nodes: tuple[int, ...]) -> dict[Mask, int]:
    return {mask: 1 << number for mask, number in subsets(nodes).numbers.items()}


@lru_cache(maxsize=MOST_NODES + 1)
def _lattice(nodes: int) -> tuple[list[int], list[int]]:
    """Sets of subsets of `nodes` nodes: for each node, those without it; for each size from 1, those of this size."""
    numbers = range(1 << nodes)
    without = [union(1 << number for number in numbers if not number >> node & 1) for node in range(nodes)]
    sized = [union(1 << number for number in numbers if number.bit_count() == size) for size in range(1, nodes + 1)]
    return without, sized


def _searched_fits(offers: Sequence[Offer], machine: Mask, work: NumaSearchBudget, most: int) -> list[Mask]:
    """The narrowest masks: from each search the lowest ones, at most `most`. Raises TooMuchWork."""
    leaner = [offer if isinstance(offer, HintRule) else _minimal(_masks_of(offer)) for offer in offers]
    searches = []
    for members, mask in _combinations(leaner, work):
        rules = [offer for i, offer in enumerate(offers) if i in members and isinstance(offer, HintRule)]
        nodes = union(rule.nodes for rule in rules)
        needs = [need for rule in rules for need in rule.needs]
        searches += [] if mask & ~machine else [Choosing(nodes, needs, work, fixed=mask)]
    sizes = [(size, search) for search in searches if (size := search.least_size()) is not None]
    least = min((size for size, _ in sizes), default=0)
    narrow = [search for size, search in sizes if size == least]
    lowest = [next(search.masks(least)) for search in narrow]
    try:
        return [mask for search in narrow for mask in islice(search.masks(least), most)]
    except TooMuchWork:
        return lowest


def _combinations(offers: Sequence[Offer], work: NumaSearchBudget) -> set[tuple[frozenset[int], Mask]]:
    """
    All combinations of one hint of each offer. The subsets of rules are not listed: a combination has the positions of
    the rules that contribute a subset, and the OR of all other hints. Equal ones count once. Raises TooMuchWork.
    """
    found: set[tuple[frozenset[int], Mask]] = {(frozenset(), 0)}
    for position, offer in enumerate(offers):
        following: set[tuple[frozenset[int], Mask]] = set()
        for rules, mask in found:
            for each in offer.besides if isinstance(offer, HintRule) else {hint.affinity or 0 for hint in offer}:
                work.step()
                following.add((rules, mask | each))
            if isinstance(offer, HintRule):
                following.add((rules | {position}, mask))
        found = following
    return found


def _width_of(offer: Offer, work: NumaSearchBudget) -> int:
    """`narrowest_width`, also of a rule. Raises TooMuchWork."""
    if not isinstance(offer, HintRule):
        return narrowest_width(offer)
    widths = [mask.bit_count() for mask in offer.besides]
    family = Choosing(offer.nodes, offer.needs, work).least_size()
    return min(widths if family is None else [*widths, family], default=0)


def _minimal(masks: set[Mask]) -> list[TopologyHint]:
    """
    Hints for the minimal masks: those of which no other mask is a subset. They are enough, because a mask that contains
    any of the masks also contains a minimal one.
    """
    kept: list[Mask] = []
    for mask in sorted(masks, key=int.bit_count):
        if not any(not less & ~mask for less in kept):
            kept.append(mask)
    return [TopologyHint(mask, True) for mask in kept]
