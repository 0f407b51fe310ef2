"""
Chooses the best of several sets of NUMA nodes: the fewest nodes, then the first in the order of the caller if there is
one, then the closest to one another if asked for, then the lowest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.numa_sets.search import Hopeless

Distances = Mapping[int, Mapping[int, int]]
"""NUMA node id -> NUMA node id -> distance."""

MaskOrder = Callable[[Mask], tuple[Any, ...]]
"""What sorts equally narrow sets of NUMA nodes, the best first."""

MasksOfSize = Callable[[int, Hopeless | None], Iterator[Mask]]
"""The sets of so many nodes, ascending, without branches that are hopeless."""


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
    """The sum of distances over all ordered pairs of nodes, a node with itself included."""
    # The kubelet divides it by the number of pairs; only masks of equal size are compared, so the sum orders alike.
    nodes = nodes_of(mask)
    return sum(distances[a][b] for a in nodes for b in nodes)


def closest(
    masks: MasksOfSize, nodes: tuple[int, ...], size: int, distances: Distances | None, fixed: Mask = 0
) -> Mask | None:
    """
    Searches the best set of `size` nodes, which adds some of `nodes` (ascending) to `fixed` ones; None if there is none.
    `masks` yields the sets ascending, so only a strictly closer one is better. A branch is hopeless if even the nearest
    nodes that it could add do not make it closer. Raises TooMuchWork.
    """
    if distances is None:
        return next(masks(size, None), None)
    best: tuple[Mask, int] | None = None
    every = (*nodes, *nodes_of(fixed))
    apart = min((distances[a][b] for a in every for b in every if a != b), default=0)
    # the least sum of distances from each node to all nodes of a set of this size that holds it
    least = {node: _row_at_least(distances[node], node, every, size) for node in every}
    least_of_all = sum(least[node] for node in nodes_of(fixed))
    least_of_all += sum(sorted(least[node] for node in nodes)[: size - fixed.bit_count()])

    def hopeless(chosen: Mask, more: int, top: int) -> bool:
        if best is None:
            return False
        inside = nodes_of(chosen)
        rows = {a: sum(distances[a][b] for b in inside) for a in inside}
        held = sum(max(row + more * apart, least[a]) for a, row in rows.items())
        if held + sum(sorted(least[node] for node in nodes[:top])[:more]) >= best[1]:
            return True
        near = sorted(
            sum(distances[a][node] + distances[node][a] for a in inside) + distances[node][node] for node in nodes[:top]
        )
        return sum(rows.values()) + sum(near[:more]) + more * (more - 1) * apart >= best[1]

    for mask in masks(size, hopeless):
        far = distance_sum(mask, distances)
        if best is None or far < best[1]:
            best = (mask, far)
        if best[1] <= least_of_all:
            break
    return None if best is None else best[0]


def _row_at_least(row: Mapping[int, int], node: int, nodes: tuple[int, ...], size: int) -> int:
    return row[node] + sum(sorted(row[other] for other in nodes if other != node)[: size - 1])
