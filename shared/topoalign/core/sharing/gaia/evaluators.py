"""
Chooses the GPUs of the tree that a container gets: a share of one GPU, one GPU, or several that are near one another.

- `share` (below 100 cores): the first of all GPUs, by what they have left, that has enough of both. Best fit on
  cores; the tree does not count.
- `fragment` (100 cores): from the root down, always into the node with the fewest free GPUs that has enough.
- `choose_linked_gpus` (more): of the nearest nodes above each GPU that have enough, the one of the lowest level with
the fewest.

Both take the first free GPUs of the node in NVML's order, however these are connected within it, and consider neither
NVLink nor memory. Memory is compared in whole blocks of 256 MiB, of GPUs alone: an inner node counts as having none.

Source: gpu-manager 8cd842ed, algorithm/nvidia, and allocateOne for `evaluate`.
"""

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_links import NVML_LEVEL, PcieClass
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.gaia.pcie_tree import (
    INTERNAL,
    GaiaTreeNode,
    GpuTree,
    build_free_tree,
    build_pcie_tree,
)
from topoalign.core.sharing.shared_gpus import SharedGpu

Chosen = tuple[SharedGpu, ...]
"""The GPUs in the order in which the container gets them; () if there are not enough."""


class GaiaRefusal(StrEnum):
    """Why gpu-manager's evaluators give no GPU."""

    NOTHING_ASKED = "zero-request"
    NOT_WHOLE_GPUS = "cores-not-multiple-of-100"
    AMOUNT_MISSING = "zero-cores-or-memory-in-share-mode"
    MEMORY_ABOVE_GPU = "request-memory-larger-than-one-card"
    NO_FREE_GPU = "no-free-node"


def evaluate(tree: GpuTree, request: Amount) -> Chosen | GaiaRefusal:
    """
    The GPUs that a container gets, or why it gets none. Above 100, cores count whole GPUs: 300 are three GPUs, whatever
    memory is asked for.
    """
    cores = request.cores
    memory = request.memory
    if not cores and not memory:
        return GaiaRefusal.NOTHING_ASKED
    if cores > CORES and cores % CORES:
        return GaiaRefusal.NOT_WHOLE_GPUS
    if cores >= CORES:
        return (choose_linked_gpus if cores > CORES else fragment)(tree, cores // CORES) or GaiaRefusal.NO_FREE_GPU
    if not cores or not memory:
        return GaiaRefusal.AMOUNT_MISSING
    chosen = share(tree, cores, memory)
    # of the first GPU alone, and only after no GPU had enough: of unequal GPUs a larger amount may be given
    if not chosen and tree.gpus and memory > tree.gpus[0].offered.memory:
        return GaiaRefusal.MEMORY_ABOVE_GPU
    return chosen or GaiaRefusal.NO_FREE_GPU


def share(tree: GpuTree, cores: int, memory: int) -> Chosen:
    """The GPU of which this many cores and bytes are given."""

    def key(gpu: SharedGpu) -> tuple[int, int, int, int]:
        return (
            gpu.left.cores,  # the one with the fewest cores left,
            gpu.left.memory // MEMORY_BLOCK,  # then the least memory,
            gpu.processes,  # then the fewest processes,
            gpu.minor,
        )

    fitting = [gpu for gpu in tree.gpus if gpu.left.cores >= cores and gpu.left.memory >= memory]
    return (min(fitting, key=key),) if fitting else ()


def fragment(tree: GpuTree, count: int) -> Chosen:
    """So many whole GPUs, out of the part of the machine that is used most and has enough."""
    node: GaiaTreeNode | None = tree.root
    narrowest = tree.root
    while node is not None:
        narrowest = node
        inner = [child for child in node.children if child.children and tree.available(child) >= count]
        node = min(inner, key=lambda child: usage(tree, child), default=None)
    return first(tree, narrowest, count)


def choose_linked_gpus(tree: GpuTree, count: int) -> Chosen:
    """So many whole GPUs, more than one, that are near one another."""
    nearest = {node for child in tree.root.children for node in nearest_with(tree, child, count)}
    best = min(nearest or {tree.root}, key=lambda node: (node.level, *usage(tree, node)))
    return first(tree, best, count)


def nearest_with(
    tree: GpuTree, node: GaiaTreeNode, count: int, best: GaiaTreeNode | None = None
) -> Iterator[GaiaTreeNode]:
    """For each GPU below a node the nearest node above it, itself included, with enough free GPUs."""
    best = node if tree.available(node) >= count else best
    if node.children:
        for child in node.children:
            yield from nearest_with(tree, child, count, best)
    elif best is not None:
        yield best


def usage(tree: GpuTree, node: GaiaTreeNode) -> tuple[int, int, int, int]:
    """The key that sorts nodes of one level, the best first."""
    gpus = [tree.gpus[member] for member in node.members]
    return (
        tree.available(node),  # the fewest free GPUs,
        gpus[0].left.memory // MEMORY_BLOCK if node.level == INTERNAL else 0,  # then the least memory left, of GPUs,
        sum(gpu.processes for gpu in gpus),  # then the fewest processes,
        min((gpu.minor for gpu in gpus), default=0),  # then the lowest minor; the original leaves it to chance
    )


def first(tree: GpuTree, node: GaiaTreeNode, count: int) -> Chosen:
    """The first free GPUs below a node, in NVML's order."""
    leaves = tree.leaves(node)
    return tuple(leaves[:count]) if len(leaves) >= count else ()


LEVEL = {kind: level for level, kind in NVML_LEVEL.items()}
UNKNOWN_LEVEL = -1
"""Joins no GPUs."""


@computed_once
def tree_root(topology: Topology) -> GaiaTreeNode:
    """The root of the tree of a machine's GPUs, which are in the order of their indexes."""

    def level(a: DeviceID, b: DeviceID) -> int:
        link = topology.link_by_pair.get((a, b))
        return UNKNOWN_LEVEL if link is None or link.pcie is None else LEVEL[link.pcie]

    levels = [[level(a.id, b.id) for b in topology.gpus] for a in topology.gpus]
    return build_pcie_tree(levels, [int(LEVEL[PcieClass.PSB] in row) for row in levels])


def choose_gpus_as_gaia(
    topology: Topology, gpus: Sequence[SharedGpu], request: Amount, among: Collection[DeviceID]
) -> Chosen:
    """
    The GPUs `among` these that a container gets, by gpu-manager's evaluators over the tree of the node's GPUs. `gpus`:
    all of the machine's, in its order. (): there are not enough.

    What may not be chosen counts as held whole: GPUs that the caller leaves out, as a kubelet's alignment does, and
    those with less memory than is asked for of each, at which gpu-manager does not look for whole GPUs. Memory without
    cores, which it starts without any GPU, is put where a share of one core would be. What it counts as processes of a
    GPU are here the allocations that hold something of it.

        pairs 0-1, 2-3 and 4-5 behind a switch each, all below one host bridge; 30 cores of GPU 1 are held
        20 cores: 1; 100 cores: 0; 200 cores: 2 and 3; 400 cores: 0, 2, 3 and 4, although 2 to 5 are two pairs
    """
    may_be_chosen = [gpu.device in among and gpu.offered.memory >= request.memory for gpu in gpus]
    seen = [
        gpu if may_be else msgspec.structs.replace(gpu, held=gpu.offered)
        for gpu, may_be in zip(gpus, may_be_chosen, strict=True)
    ]
    tree = build_free_tree(tree_root(topology), seen)
    found = evaluate(tree, msgspec.structs.replace(request, cores=max(1, request.cores)))
    return () if isinstance(found, GaiaRefusal) else found
