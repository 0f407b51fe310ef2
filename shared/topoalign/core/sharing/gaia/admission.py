"""
Finds the node that gpu-admission would choose for a pod, and the GPUs that it would promise there, before gpu-manager
chooses again.

Nodes are tried with the most loaded first: fewest cores left, then least memory left, then by name. The first that has room
for every container of the pod gets it (`admission_order_key`); all others are refused, so the scheduler has no
choice. On a node, containers are placed in the order of the pod's spec (`place_containers`):

- below 100 cores on the first GPU with enough of both, by cores left, memory left, the least first, and index;
- else on whole GPUs in that order: of 150 cores one GPU, since they are divided and rounded down.

It does not use the tree, processes or minor numbers. A GPU whose cores nobody holds counts as whole even if memory of it is
held; taking it whole then fails, and the node with it.

The score `gaia` ranks nodes so, and there a promise shows only whether the pod finds room: a container gets the GPUs that
gpu-manager's evaluators choose (`gaia.evaluators`). So does gpu-manager: it ignores a promise of whole GPUs, and
fails where the promise of a share differs from its choice. What is held is taken from the record, and not from annotations.

Source: gpu-admission 47d56ae, predicate (deviceFilter), algorithm and device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import sum_amounts

Load = tuple[int, int, NodeName]
"""Cores and bytes that a node has left, and its name."""
MOST_KEPT = 64
"""Pods with different amounts for which a node caches whether they find room: 5 KB."""


@dataclass(frozen=True, kw_only=True)
class AdmissionNode:
    """A node with its GPUs as they are held now."""

    name: NodeName
    gpus: tuple[SharedGpu, ...]
    """By index."""
    rest: int = 0
    """Bytes that the node has beyond its GPUs: what is left over where its memory is divided by their number."""

    @cached_property
    def load(self) -> Load:
        """The key that sorts nodes in the order in which they are tried."""
        return (
            sum([gpu.left.cores for gpu in self.gpus]),  # the fewest cores left,
            sum([gpu.left.memory for gpu in self.gpus]) + self.rest,  # then the least memory,
            self.name,
        )

    @cached_property
    def rooms(self) -> dict[tuple[Amount, ...], bool]:
        """Containers of a pod -> whether they find room, at most `MOST_KEPT`."""
        return {}

    def has_room(self, containers: tuple[Amount, ...]) -> bool:
        """
        Whether each container of a pod finds room (`place_containers`). 10 to 50 µs with eight GPUs the first time,
        then below 1 µs: a scheduler asks for each pod about all nodes, of which few have changed, and most pods ask for
        what others ask for.
        """
        known = self.rooms.get(containers)
        if known is None:
            if len(self.rooms) >= MOST_KEPT:
                self.rooms.clear()
            known = self.rooms[containers] = place_containers(self.gpus, containers) is not None
        return known


def asks_for_gpu(containers: Sequence[Amount]) -> bool:
    """
    Whether a pod of these containers asks for GPUs: by their sums, so one may do whose containers each lack an amount. A
    share needs memory in addition to its cores, whole GPUs do not.
    """
    cores = sum(each.cores for each in containers)
    memory = sum(each.memory for each in containers)
    return cores >= CORES or (cores > 0 and memory > 0)


def admission_order_key(node: AdmissionNode, containers: Sequence[Amount]) -> tuple[bool, Load]:
    """
    The key that sorts nodes with GPUs for a pod. The lowest is that of the node which gpu-admission chooses: those without
    room come last, in the order in which they are tried as well.
    """
    return not node.has_room(tuple(containers)), node.load


def place_containers(gpus: Sequence[SharedGpu], containers: Sequence[Amount]) -> dict[int, tuple[int, ...]] | None:
    """Position of each container with a GPU -> indexes of its GPUs; None if one of them finds no room."""
    left = list(gpus)
    placed: dict[int, tuple[int, ...]] = {}
    for position, asked in enumerate(containers):
        if not asks_for_gpu((asked,)):
            continue
        is_whole = asked.cores >= CORES
        count = asked.cores // CORES if is_whole else 1
        least = Amount(cores=CORES, memory=0) if is_whole else asked
        order = sorted(
            (gpu.left.cores, gpu.left.memory, index)
            for index, gpu in enumerate(left)
            if gpu.left.cores >= least.cores and gpu.left.memory >= least.memory
        )
        chosen = tuple(index for *_, index in order[:count])
        if len(chosen) < count:
            return None
        for index in chosen:
            taken = hold_container_amounts(left[index], asked)
            if taken is None:
                return None
            left[index] = taken
        placed[position] = chosen
    return placed


def hold_container_amounts(gpu: SharedGpu, asked: Amount) -> SharedGpu | None:
    """The GPU with a container's amounts held, from 100 cores on whole; None if it has not as much left."""
    taken = gpu.offered if asked.cores >= CORES else asked
    if taken.cores > gpu.left.cores or taken.memory > gpu.left.memory:
        return None
    return msgspec.structs.replace(gpu, held=sum_amounts((gpu.held, taken)))
