"""
The merge of the providers' hints into the one that everything of a container is aligned to.

The rule (kubelet v1.36.3, topologymanager): take one hint of every list and AND their masks; that is a candidate, and it is
preferred only if all its hints are and their masks are equal. The best candidate is the narrowest preferred one. If there
is none, it is the widest that does not exceed B, the width of the greediest resource's narrowest hint; if there is none
either, the narrowest of all.

The kubelet walks through all combinations, of which 8 NUMA nodes and 5 resources have 10^12. The same result costs little:

- A candidate is preferred only where every list has that very mask as a preferred hint, or a preferred hint for any node:
  intersecting sets finds these.
- Otherwise only the set of AND masks counts. For a mask m, the combinations whose AND contains m number the product over
  the lists of "hints that contain m"; taking from that the combinations whose AND is larger leaves those whose AND is m.
  Both steps are sums over supersets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add, and_, mul, or_, sub

from topoalign.core.hints.enumeration import subsets
from topoalign.core.hints.model import Hints, ProviderHints, TopologyHint
from topoalign.core.topology.bitmask import Mask, nodes_of

HintLists = Sequence[Sequence[TopologyHint]]
"""One list per resource of each provider; empty means that no combination exists."""

Distances = Mapping[int, Mapping[int, int]]
"""NUMA node id -> NUMA node id -> distance."""

ANY = TopologyHint(None, True)
NOWHERE = TopologyHint(None, False)


def hint_lists(providers: Iterable[ProviderHints]) -> list[tuple[TopologyHint, ...]]:
    """What each answer counts as: no opinion fits any node and is preferred, an empty list fits any and is not."""
    return [each for provider in providers for each in (map(counted, provider.values()) if provider else ((ANY,),))]


def counted(hints: Hints) -> tuple[TopologyHint, ...]:
    return (ANY,) if hints is None else hints or (NOWHERE,)


def merge(lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
    """
    The best hint that the lists have in common; the whole machine, not preferred, if they have none.

    `distances` are given where the closest NUMA nodes are to be preferred among equally many. Raises TooManyNumaNodes if
    the candidates could lie on more than 12 NUMA nodes.
    """
    preferred = agreed(lists, machine)
    if preferred:
        return TopologyHint(narrowest(preferred, distances), True)
    candidates = common(lists, machine)
    if not candidates:
        return TopologyHint(machine, False)
    greediest = max((narrowest_width(hints) for hints in lists), default=0)
    within = [mask for mask in candidates if mask.bit_count() <= greediest]
    widest = max((mask.bit_count() for mask in within), default=0)
    chosen = [mask for mask in within if mask.bit_count() == widest] or candidates
    return TopologyHint(narrowest(chosen, distances), False)


def agreed(lists: HintLists, machine: Mask) -> set[Mask]:
    """The masks of preferred candidates: each list prefers the mask itself, or any node."""
    offered = [{hint.affinity for hint in hints if hint.preferred} for hints in lists]
    masks = {mask for each in offered for mask in each if mask is not None}
    common = {mask & machine for mask in masks if all(mask in each or None in each for each in offered)}
    if all(None in each for each in offered):
        common.add(machine)
    return common - {0}


def narrowest_width(hints: Iterable[TopologyHint]) -> int:
    """NUMA nodes of the narrowest hint that names any; 0 if none does."""
    return min((hint.affinity.bit_count() for hint in hints if hint.affinity is not None), default=0)


def narrowest(masks: Iterable[Mask], distances: Distances | None) -> Mask:
    """The best of these masks: the fewest NUMA nodes, then the closest to one another if asked for, then the lowest."""
    masks = list(masks)
    fewest = min(mask.bit_count() for mask in masks)
    equal = [mask for mask in masks if mask.bit_count() == fewest]
    return min(equal) if distances is None else min(equal, key=lambda mask: (spread(mask, distances), mask))


def spread(mask: Mask, distances: Distances) -> int:
    """
    The sum of distances over all ordered pairs of nodes, a node with itself included.

    The kubelet divides it by the number of pairs; only masks of equal size are compared, so the sum orders alike.
    """
    nodes = nodes_of(mask)
    return sum(distances[a][b] for a in nodes for b in nodes)


def common(lists: HintLists, machine: Mask) -> list[Mask]:
    """Every non-empty mask that is the AND of one hint of each list."""
    if not all(lists):
        return []
    narrowing = [
        [hint.affinity for hint in hints] for hints in lists if any(hint.affinity is not None for hint in hints)
    ]
    if not narrowing:
        return [machine]
    unions = (reduce(or_, (machine if mask is None else mask for mask in masks)) for masks in narrowing)
    reach = reduce(and_, unions, machine)
    space = subsets(nodes_of(reach))
    combinations = [1] * len(space.masks)
    for masks in narrowing:
        offered = {reach if mask is None else mask & reach for mask in masks}
        containing = over_supersets([int(mask in offered) for mask in space.masks], add)
        combinations = list(map(mul, combinations, containing))
    exactly = over_supersets(combinations, sub)
    return [mask for mask, number in zip(space.masks, exactly, strict=True) if mask and number]


def over_supersets(values: list[int], combine: Callable[[int, int], int]) -> list[int]:
    """
    With `add`: for each subset the sum over all its supersets. With `sub`: back again.

    One pass per node combines each subset without the node with the one that has it. A pass leaves the lowest node as the
    highest, so after all passes the subsets stand as they stood.
    """
    for _ in range(len(values).bit_length() - 1):
        having = values[1::2]
        values = [*map(combine, values[::2], having), *having]
    return values
