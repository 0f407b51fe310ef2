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

from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.sharing.shared_gpus import WHOLE_GPU_CORES, SharedGpu
from topoalign.core.state.share_amounts import NONE_HELD

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
    cards: tuple[SharedGpu, ...]
    """In NVML's order."""
    free: frozenset[int]
    """GPUs that may be given whole."""

    def available(self, node: GaiaTreeNode) -> int:
        """How many GPUs below a node are free. A GPU counts as one, even if it is in use."""
        return sum([member in self.free for member in node.members]) if node.children else 1

    def leaves(self, node: GaiaTreeNode) -> list[SharedGpu]:
        """The free GPUs below a node, in NVML's order. A GPU counts as free, even if it is in use."""
        return [self.cards[member] for member in node.members if member in self.free or not node.children]


def build_free_tree(root: GaiaTreeNode, gpus: Sequence[SharedGpu]) -> GpuTree:
    """
    The tree of GPUs as they are held now. Those that are unhealthy are not free.

    Raises ValueError for another number of GPUs than the tree has.
    """
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
        if level in clusters:
            join_pair(clusters[level], {a, b})
    below: dict[Place, dict[Place, None]] = {(ROOT, 0): {}}
    for gpu in range(len(levels)):
        lower: Place = (INTERNAL, gpu)
        for place in tree_nodes_above(clusters, gpu):
            below.setdefault(place, {})[lower] = None
            lower = place
        below[(ROOT, 0)][lower] = None
    return assemble((ROOT, 0), below)


def join_pair(clusters: list[set[int]], pair: set[int]) -> None:
    """Adds two GPUs to the first cluster that has one of them, else as a new one. Clusters are never merged."""
    for cluster in clusters:
        if cluster & pair:
            cluster |= pair
            return
    clusters.append(pair)


def tree_nodes_above(clusters: dict[int, list[set[int]]], gpu: int) -> Iterator[Place]:
    """The nodes above a GPU, the nearest first: on each level the first that has a GPU in common with the one below."""
    members = {gpu}
    for level in LEVELS:
        number = next((at for at, cluster in enumerate(clusters[level]) if cluster & members), None)
        if number is not None:
            members = clusters[level][number]
            yield level, number


def assemble(place: Place, below: dict[Place, dict[Place, None]]) -> GaiaTreeNode:
    """The node at a place with all that is below it."""
    level, number = place
    if level == INTERNAL:
        return GaiaTreeNode(level, (number,))
    children = tuple(assemble(lower, below) for lower in below[place])
    return GaiaTreeNode(level, tuple(sorted(member for child in children for member in child.members)), children)


def occupy(tree: GpuTree, at: int, cores: int, memory: int) -> GpuTree:
    """
    The tree after cores and bytes of the GPU at this position are given; from 100 cores on the whole GPU.

    Whatever is given, and be it memory alone, the GPU is no longer free.
    """
    left = tree.cards[at].left
    if cores >= WHOLE_GPU_CORES:
        rest = NONE_HELD
    else:
        rest = Amount(cores=max(0, left.cores - cores), memory=max(0, left.memory - memory))
    return with_amount_left(tree, at, rest, tree.free - {at})


def with_amount_left(tree: GpuTree, at: int, left: Amount, free: frozenset[int]) -> GpuTree:
    """The tree with another amount left of one GPU."""
    offered = tree.cards[at].offered
    held = Amount(cores=offered.cores - left.cores, memory=offered.memory - left.memory)
    changed = msgspec.structs.replace(tree.cards[at], held=held, usable=True)
    return GpuTree(tree.root, (*tree.cards[:at], changed, *tree.cards[at + 1 :]), free)
