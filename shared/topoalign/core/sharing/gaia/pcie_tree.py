"""
Builds the tree of a machine's GPUs by their common ancestors on PCIe, with those that are free.

NVML reports for each pair of GPUs how near their common ancestor is: 10 a single switch, 20 several, 30 a host bridge, 40 a
CPU, 50 the system; 0 is one board. Pairs of one level that share a GPU make one node of that level. Above a GPU or node is
the first node of the next level that has one of its GPUs in it. NVLink does not count.

    levels 0-1: 10, 2-3: 10, all others: 50        root(0 1 2 3) - 50(0 1 2 3) - 10(0 1), 10(2 3)

GPUs are known by their position in NVML's order. There may be more than the original's 32, and those of which no
ancestor is known hang below the root: the original ends with an error there, or omits them.

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
"""Level and number of a node while the tree is built; of a GPU its position."""


class GaiaTreeNode(msgspec.Struct, frozen=True):
    """A GPU, or what some GPUs have in common."""

    level: int
    """0 for a GPU, 60 for the root."""
    members: tuple[int, ...]
    """The GPUs below it, ascending; of a GPU itself."""
    children: tuple["GaiaTreeNode", ...] = ()
    """Empty for a GPU."""


class GpuTree(msgspec.Struct, frozen=True):
    """The tree with what its GPUs have left."""

    root: GaiaTreeNode
    gpus: tuple[SharedGpu, ...]
    """In NVML's order."""
    free: frozenset[int]
    """GPUs that may be given whole."""

    def available(self, node: GaiaTreeNode) -> int:
        """How many GPUs below a node are free. A GPU counts as one, even if it is in use."""
        return sum([member in self.free for member in node.members]) if node.children else 1

    def leaves(self, node: GaiaTreeNode) -> list[SharedGpu]:
        """The free GPUs below a node, in NVML's order. A GPU counts as free, even if it is in use."""
        return [self.gpus[member] for member in node.members if member in self.free or not node.children]


def build_free_tree(root: GaiaTreeNode, gpus: Sequence[SharedGpu]) -> GpuTree:
    """The tree with what is held of its GPUs; unhealthy ones are not free. Raises ValueError for another number of GPUs."""
    if len(gpus) != len(root.members):
        raise ValueError(f"{len(gpus)} GPUs for a tree of {len(root.members)}")
    free = frozenset(at for at, gpu in enumerate(gpus) if gpu.unused)
    return GpuTree(root, tuple(gpus), free)


def build_pcie_tree(levels: Sequence[Sequence[int]], boards: Sequence[int]) -> GaiaTreeNode:
    """
    The root of the tree. `levels[a][b]`: common ancestor of two GPUs; unknown levels join nothing.

    `boards[a]` above 0: NVML reports that GPU a is on a board with several GPUs, so level 0 counts as a single switch.
    """
    clusters: dict[int, list[set[int]]] = {level: [] for level in LEVELS}
    for a, b in combinations(range(len(levels)), 2):
        level = SINGLE_SWITCH if levels[a][b] == INTERNAL and boards[a] > 0 else levels[a][b]
        if level not in clusters:
            continue
        # a pair goes to the first cluster that has one of its GPUs; clusters are never merged
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
            # above a GPU or node is the first of the next level that has one of its GPUs
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
