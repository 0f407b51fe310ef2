"""
Sets of NUMA nodes as plain integers: bit i stands for the node with id i.

The id of a node is not its position: ids can be sparse (0, 8, 252) and larger than 63. A Python int has no limit. Masks
are ordered as in the kubelet: by the number of nodes, then by the value of the mask.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import combinations
from operator import or_

Mask = int

EVERYWHERE: Mask = -1
"""All nodes, known or not."""


def node_mask(nodes: Iterable[int]) -> Mask:
    """The mask of these node ids. Raises ValueError for a negative id."""
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


def nodes_of(mask: Mask) -> tuple[int, ...]:
    """The node ids of a mask, ascending."""
    nodes = []
    while mask:
        lowest = mask & -mask
        nodes.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(nodes)


def several(mask: Mask) -> bool:
    """Whether a mask has more than one node."""
    return mask & (mask - 1) != 0


def union(masks: Iterable[Mask]) -> Mask:
    """The mask of all nodes of these masks."""
    return reduce(or_, masks, 0)


def narrowness(mask: Mask) -> tuple[int, int]:
    """The key that sorts masks as in the kubelet: by the number of nodes, then by the value of the mask."""
    return (mask.bit_count(), mask)


def masks_by_size(nodes: Iterable[int]) -> Iterator[Mask]:
    """Yields all 2^n - 1 non-empty subsets by size, then by position, in the same order as the kubelet."""
    bits = [1 << node for node in nodes]
    for size in range(1, len(bits) + 1):
        for chosen in combinations(bits, size):
            yield sum(chosen)
