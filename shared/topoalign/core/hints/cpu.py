"""
Where CPUs can be had exclusively (kubelet v1.36.3, CPU manager, policy static).

Subsets are taken of the NUMA nodes that have CPUs. All CPUs of a pod's finished init containers must lie inside a subset
for it to count, because the next container is to take them over.
"""

from collections import Counter
from collections.abc import Set

from topoalign.core.hints.enumeration import doubled, hints_where, subsets
from topoalign.core.hints.model import Hints
from topoalign.core.requests import Mode
from topoalign.core.topology.bitmask import Mask, mask_of
from topoalign.core.topology.cpus import CpuTopology


def cpu_hints(
    cpus: CpuTopology,
    available: Set[int],
    reusable: Set[int],
    requested: int,
    mode: Mode,
    held: Set[int] = frozenset(),
) -> Hints:
    """
    The hints for `requested` whole CPUs.

    `available` are those of the shared pool that are not reserved, `reusable` were left by init containers of the pod,
    `held` are what this container has already.
    """
    if held:
        return possible(cpus, held, frozenset(), requested, mode) if len(held) == requested else ()
    return possible(cpus, available, reusable, requested, mode)


def possible(cpus: CpuTopology, available: Set[int], reusable: Set[int], requested: int, mode: Mode) -> Hints:
    space = subsets(tuple(cpus.in_node))
    free = Counter(cpus.node_of[cpu] for each in (available, reusable) for cpu in each)
    obligatory: Mask = mask_of({cpus.node_of[cpu] for cpu in reusable})
    could = [count >= requested for count in doubled(len(inside) for inside in cpus.in_node.values())]
    fits = [
        count >= requested and obligatory & ~mask == 0
        for count, mask in zip(doubled(free[node] for node in space.nodes), space.masks, strict=True)
    ]
    return hints_where(space, could, fits, mode)
