"""
Chooses the GPUs of the tree that a container gets: a share of one GPU, one GPU, or several that are near one another.

- `share` (fewer than 100 cores): of the GPUs with enough free cores and memory, the one with the fewest free cores,
  then the least free memory (best fit). The tree does not matter.
- `fragment` (100 cores): goes down from the root, always to the child with the fewest free GPUs that are still enough.
- `choose_linked_gpus` (more than 100 cores): for each GPU, finds the nearest node above it with enough free GPUs. Of
  these nodes, it takes the one of the lowest level, and of one level, the one with the fewest free GPUs.

The last two take the first free GPUs of the node in NVML's order, regardless of the connections within the node, NVLink
and the requested memory. The memory of GPUs is compared in blocks of 256 MiB; that of inner nodes counts as 0.

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
    """Why gpu-manager's evaluators choose no GPU."""

    NOTHING_ASKED = "zero-request"
    NOT_WHOLE_GPUS = "cores-not-multiple-of-100"
    AMOUNT_MISSING = "zero-cores-or-memory-in-share-mode"
    MEMORY_ABOVE_GPU = "request-memory-larger-than-one-card"
    NO_FREE_GPU = "no-free-node"


def evaluate(tree: GpuTree, request: Amount) -> Chosen | GaiaRefusal:
    """
    The GPUs that a container gets, or why it gets none. 100 cores or more are a number of whole GPUs: 300 cores are
    three GPUs, regardless of the requested memory.
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
    # Compared only with the first GPU, and only if no GPU fits. So if the GPUs differ, a container can get more memory
    # than the first GPU has.
    if not chosen and tree.gpus and memory > tree.gpus[0].offered.memory:
        return GaiaRefusal.MEMORY_ABOVE_GPU
    return chosen or GaiaRefusal.NO_FREE_GPU


def share(tree: GpuTree, cores: int, memory: int) -> Chosen:
    """The GPU on which a container gets these cores and bytes; () if there is none."""

    def key(gpu: SharedGpu) -> tuple[int, int, int, int]:
        return (
            gpu.left.cores,  # the one with the fewest free cores,
            gpu.left.memory // MEMORY_BLOCK,  # then the least free memory,
            gpu.processes,  # then the fewest processes,
            gpu.minor,
        )

    fitting = [gpu for gpu in tree.gpus if gpu.left.cores >= cores and gpu.left.memory >= memory]
    return (min(fitting, key=key),) if fitting else ()


def fragment(tree: GpuTree, count: int) -> Chosen:
    """`count` whole GPUs, from the part of the tree with the fewest free GPUs that are still enough."""
    node: GaiaTreeNode | None = tree.root
    narrowest = tree.root
    while node is not None:
        narrowest = node
        inner = [child for child in node.children if child.children and tree.available(child) >= count]
        node = min(inner, key=lambda child: usage(tree, child), default=None)
    return first(tree, narrowest, count)


def choose_linked_gpus(tree: GpuTree, count: int) -> Chosen:
    """`count` whole GPUs, more than one, that are near one another."""
    nearest = {node for child in tree.root.children for node in nearest_with(tree, child, count)}
    best = min(nearest or {tree.root}, key=lambda node: (node.level, *usage(tree, node)))
    return first(tree, best, count)


def nearest_with(
    tree: GpuTree, node: GaiaTreeNode, count: int, best: GaiaTreeNode | None = None
) -> Iterator[GaiaTreeNode]:
    """
    For each GPU below a node, the nearest node above it, including the GPU itself, with enough free GPUs. `best`: the
    nearest one above `node`.
    """
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
        gpus[0].left.memory // MEMORY_BLOCK if node.level == INTERNAL else 0,  # then, for GPUs, the least free memory,
        sum(gpu.processes for gpu in gpus),  # then the fewest processes,
        min((gpu.minor for gpu in gpus), default=0),  # then the lowest minor; random in the original
    )


def first(tree: GpuTree, node: GaiaTreeNode, count: int) -> Chosen:
    """The first `count` free GPUs below a node, in NVML's order; () if there are fewer."""
    leaves = tree.leaves(node)
    return tuple(leaves[:count]) if len(leaves) >= count else ()


LEVEL = {kind: level for level, kind in NVML_LEVEL.items()}
UNKNOWN_LEVEL = -1
"""Joins no GPUs."""


@computed_once
def tree_root(topology: Topology) -> GaiaTreeNode:
    """The root of the tree of a machine's GPUs. Their positions are those in `gpus`."""

    def level(a: DeviceID, b: DeviceID) -> int:
        link = topology.link_by_pair.get((a, b))
        return UNKNOWN_LEVEL if link is None or link.pcie is None else LEVEL[link.pcie]

    levels = [[level(a.id, b.id) for b in topology.gpus] for a in topology.gpus]
    return build_pcie_tree(levels, [int(LEVEL[PcieClass.PSB] in row) for row in levels])


def choose_gpus_as_gaia(
    topology: Topology, gpus: Sequence[SharedGpu], request: Amount, among: Collection[DeviceID]
) -> Chosen:
    """
    The GPUs in `among` that gpu-manager's evaluators choose for a container in the tree of the node's GPUs. `gpus`: all
    GPUs of the machine, in its order. (): there are not enough.

    There are three differences from gpu-manager. First, GPUs that must not be chosen count as held whole: those that
    are not in `among`, for example because of the kubelet's alignment, and those with less memory than is requested of
    each GPU. (gpu-manager does not check the memory of whole GPUs.) Second, a request for memory without cores is
    placed like a share with one core; gpu-manager starts such a container without a GPU. Third, the number of processes
    of a GPU is the number of allocations that hold something of it. Example:

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
