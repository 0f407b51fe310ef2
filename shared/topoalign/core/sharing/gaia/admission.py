"""
Finds the node and the GPUs that gpu-admission would choose for a pod. Later, gpu-manager chooses the GPUs again.

Nodes are tried from the most to the least loaded: the fewest free cores first, then the least free memory, then by
name. gpu-admission chooses the first node on which all containers fit (`admission_order_key`), and refuses all others,
so the scheduler has no choice. On a node, containers are placed in the order of the spec (`place_containers`):

- fewer than 100 cores: on the first GPU with enough free cores and memory. The GPUs are in ascending order of free
  cores, then of free memory, then of index.
- 100 cores or more: on whole GPUs in the same order. The number of GPUs is the number of cores divided by 100 and
  rounded down: one GPU for 150 cores.

The tree, processes and minor numbers do not matter. A GPU without held cores counts as whole even if memory of it is
held. If such a GPU is chosen, the node does not fit.

The score `gaia` ranks nodes by these rules. It uses the assigned GPUs only to find whether the pod fits. The container
gets the GPUs that gpu-manager's evaluators choose (`gaia.evaluators`). This corresponds to gpu-manager, which ignores
an assignment of whole GPUs, and fails if the assignment of a share differs from its choice. The held amounts are those
in topoalign's record, not those in annotations.

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
"""Free cores and bytes of a node, and its name."""
MOST_KEPT = 64
"""Number of pods with different amounts for which a node caches whether they fit: 5 KB."""


@dataclass(frozen=True, kw_only=True)
class AdmissionNode:
    """A node with the present state of its GPUs."""

    name: NodeName
    gpus: tuple[SharedGpu, ...]
    """By index."""
    rest: int = 0
    """The remainder in bytes if the node's memory is divided by the number of its GPUs."""

    @cached_property
    def load(self) -> Load:
        """The key that sorts nodes in the order in which they are tried."""
        return (
            sum([gpu.left.cores for gpu in self.gpus]),  # the fewest free cores,
            sum([gpu.left.memory for gpu in self.gpus]) + self.rest,  # then the least free memory,
            self.name,
        )

    @cached_property
    def rooms(self) -> dict[tuple[Amount, ...], bool]:
        """Amounts of a pod's containers -> whether they fit; at most `MOST_KEPT` entries."""
        return {}

    def has_room(self, containers: tuple[Amount, ...]) -> bool:
        """
        Whether all containers of a pod fit (`place_containers`). The first call takes 10 to 50 µs with eight GPUs,
        later calls with the same amounts take less than 1 µs. The cache pays off because a scheduler checks all nodes
        for each pod, few nodes have changed in the meantime, and most pods request the same amounts as others.
        """
        known = self.rooms.get(containers)
        if known is None:
            if len(self.rooms) >= MOST_KEPT:
                self.rooms.clear()
            known = self.rooms[containers] = place_containers(self.gpus, containers) is not None
        return known


def asks_for_gpu(containers: Sequence[Amount]) -> bool:
    """
    Whether a pod with these containers requests GPUs. A share needs cores and memory; whole GPUs need only cores. Only
    the sums count, so a pod can request GPUs although one of the amounts is missing in each container.
    """
    cores = sum(each.cores for each in containers)
    memory = sum(each.memory for each in containers)
    return cores >= CORES or (cores > 0 and memory > 0)


def admission_order_key(node: AdmissionNode, containers: Sequence[Amount]) -> tuple[bool, Load]:
    """
    The key that sorts nodes with GPUs for a pod. gpu-admission chooses the node with the lowest key. Nodes on which the
    pod does not fit come last, in the order in which they are tried.
    """
    return not node.has_room(tuple(containers)), node.load


def place_containers(gpus: Sequence[SharedGpu], containers: Sequence[Amount]) -> dict[int, tuple[int, ...]] | None:
    """Position of each container with GPUs -> indexes of its GPUs. None: at least one container does not fit."""
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
    """The GPU after a container got these amounts, or the whole GPU from 100 cores on. None: not enough is free."""
    taken = gpu.offered if asked.cores >= CORES else asked
    if taken.cores > gpu.left.cores or taken.memory > gpu.left.memory:
        return None
    return msgspec.structs.replace(gpu, held=sum_amounts((gpu.held, taken)))
