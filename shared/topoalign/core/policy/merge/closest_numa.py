"""
Chooses the best of several sets of NUMA nodes: the fewest nodes, then the first in the order of the caller if there is
one, then the closest to one another if distances are given, then the lowest.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from topoalign.core.model.topology.bitmask import Mask, nodes_of

Distances = Mapping[int, Mapping[int, int]]
"""NUMA node id -> NUMA node id -> distance."""

MaskOrder = Callable[[Mask], tuple[Any, ...]]
"""Mask -> sort key among equally narrow sets of NUMA nodes. The best set has the lowest key."""


def choose_narrowest_mask(masks: Iterable[Mask], distances: Distances | None, order: MaskOrder | None = None) -> Mask:
    """The best of these masks."""
    masks = list(masks)
    fewest = min(mask.bit_count() for mask in masks)
    equal = [mask for mask in masks if mask.bit_count() == fewest]
    if len(equal) == 1:
        return equal[0]
    return min(
        equal,
        key=lambda mask: (
            order(mask) if order is not None else (),
            distance_sum(mask, distances) if distances is not None else 0,
            mask,
        ),
    )


def distance_sum(mask: Mask, distances: Distances) -> int:
    """The sum of the distances over all ordered pairs of nodes, including each node with itself."""
    # The kubelet divides it by the number of pairs. Only masks of equal size are compared, so the order is the same.
    nodes = nodes_of(mask)
    return sum(distances[a][b] for a in nodes for b in nodes)
