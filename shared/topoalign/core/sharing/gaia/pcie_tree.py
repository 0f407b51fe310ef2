"""
Builds the tree of a machine's GPUs by their common ancestors on PCIe, and finds the free GPUs in it.

For each pair of GPUs, NVML reports the level of their common ancestor: 0 the same board, 10 a single switch, 20 several
switches, 30 a host bridge, 40 a CPU, 50 the system. Pairs of one level with a GPU in common form a node of that level.
The parent of a GPU or node is the first node of the next level that contains one of its GPUs. NVLink does not count.

    levels 0-1: 10, 2-3: 10, all others: 50        root(0 1 2 3) - 50(0 1 2 3) - 10(0 1), 10(2 3)

GPUs are identified by their position in NVML's order. There are two differences from the original. It supports at most
32 GPUs. If the ancestors of a GPU are unknown, it fails or omits the GPU; here, the GPU is a child of the root.

Source: gpu-manager 8cd842ed, device/nvidia (tree).
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec

from topoalign.core.sharing.shared_gpus import SharedGpu

INTERNAL = 0
SINGLE_SWITCH = 10
ROOT = 60
LEVELS = (SINGLE_SWITCH, 20, 30, 40, 50)
"""The levels of inner nodes, from the GPUs upwards."""

Place = tuple[int, int]
"""Level and number of a node, used to build the tree. The number of a GPU is its position."""


class GaiaTreeNode(msgspec.Struct, frozen=True):
    """A node of the tree: a GPU, or a common ancestor of GPUs."""

    level: int
    """0 for a GPU, 60 for the root."""
    members: tuple[int, ...]
    """The GPUs below it, ascending. For a GPU: the GPU itself."""
    children: tuple["GaiaTreeNode", ...] = ()
    """Empty for a GPU."""


class GpuTree(msgspec.Struct, frozen=True):
    """The tree with the state of its GPUs."""

    root: GaiaTreeNode
    gpus: tuple[SharedGpu, ...]
    """In NVML's order."""
    free: frozenset[int]
    """GPUs that can be allocated whole."""

    def available(self, node: GaiaTreeNode) -> int:
        """Number of free GPUs below a node. If the node is a GPU: 1, even if it is in use."""
        return sum([member in self.free for member in node.members]) if node.children else 1

    def leaves(self, node: GaiaTreeNode) -> list[SharedGpu]:
        """The free GPUs below a node, in NVML's order. If the node is a GPU: the GPU, even if it is in use."""
        return [self.gpus[member] for member in node.members if member in self.free or not node.children]


def build_free_tree(root: GaiaTreeNode, gpus: Sequence[SharedGpu]) -> GpuTree:
    """The tree with its GPUs' state. Unhealthy GPUs are not free. Raises ValueError if the numbers of GPUs differ."""
    if len(gpus) != len(root.members):
        raise ValueError(f"{len(gpus)} GPUs for a tree of {len(root.members)}")
    free = frozenset(at for at, gpu in enumerate(gpus) if gpu.unused)
    return GpuTree(root, tuple(gpus), free)


def build_pcie_tree(levels: Sequence[Sequence[int]], boards: Sequence[int]) -> GaiaTreeNode:
    """
    The root of the tree. `levels[a][b]`: level of the common ancestor of two GPUs; unknown levels are ignored.

    `boards[a]` above 0: NVML reports that GPU a is on a board with several GPUs. Its level 0 counts as a single switch.
    """
    clusters: dict[int, list[set[int]]] = {level: [] for level in LEVELS}
    for a, b in combinations(range(len(levels)), 2):
        level = SINGLE_SWITCH if levels[a][b] == INTERNAL and boards[a] > 0 else levels[a][b]
        if level not in clusters:
            continue
        # a pair is added to the first cluster that contains one of its GPUs; clusters are never merged
        near = next((cluster for cluster in clusters[level] if not cluster.isdisjoint((a, b))), None)
        if near is None:
            clusters[level].append({a, b})
        else:
            near |= {a, b}
    below: dict[Place, dict[Place, None]] = {(ROOT, 0): {}}
    for gpu in range(len(levels)):
        lower: Place = (INTERNAL, gpu)
        members = {gpu}
        for level in LEVELS:
            # the parent is the first cluster of the next level that contains one of the GPUs
            number = next((at for at, cluster in enumerate(clusters[level]) if cluster & members), None)
            if number is not None:
                members = clusters[level][number]
                below.setdefault((level, number), {})[lower] = None
                lower = (level, number)
        below[(ROOT, 0)][lower] = None
    return _assemble((ROOT, 0), below)


def _assemble(place: Place, below: dict[Place, dict[Place, None]]) -> GaiaTreeNode:
    level, number = place
    if level == INTERNAL:
        return GaiaTreeNode(level, (number,))
    children = tuple(_assemble(lower, below) for lower in below[place])
    return GaiaTreeNode(level, tuple(sorted(member for child in children for member in child.members)), children)
