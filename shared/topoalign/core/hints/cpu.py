"""
Where CPUs can be had exclusively (kubelet v1.36.3, CPU manager, policy static).

Subsets are taken of the NUMA nodes that have CPUs. All CPUs of a pod's finished init containers must lie inside a subset
for it to count, because the next container is to take them over.

Where CPUs are aligned by socket, a subset is preferred, too, that touches no more sockets than the narrowest would need: the
nodes of a socket are then as good as one (align-by-socket). Mode `best` takes the narrowest nodes in any case.
"""

from collections import Counter
from collections.abc import Sequence, Set

from topoalign.core.hints.rules import Supply, hints_from, hints_of_rule
from topoalign.core.model.hints import HintRule, Hints, Need, TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask, mask_of
from topoalign.core.model.topology.cpus import CpuTopology
from topoalign.core.profile import profile_of


def cpu_hints(
    cpus: CpuTopology,
    available: Set[int],
    reusable: Set[int],
    requested: int,
    mode: Mode,
    held: Set[int] = frozenset(),
    by_socket: bool = False,
    machine: int = 0,
) -> Hints:
    """
    The hints for `requested` whole CPUs.

    `available` are those of the shared pool that are not reserved, `reusable` were left by init containers of the pod,
    `held` are what this container has already; `by_socket` is the option align-by-socket, `machine` the number of NUMA
    nodes, those without CPUs included.
    """
    if held and len(held) != requested:
        return ()
    left = frozenset() if held else reusable
    hints = possible(cpus, held or available, left, requested, mode, machine)
    if not by_socket or not profile_of(mode).aligns_by_socket:
        return hints
    return aligned_by_socket(cpus, hints_of_rule(hints) if isinstance(hints, HintRule) else hints, requested)


def aligned_by_socket(cpus: CpuTopology, hints: Sequence[TopologyHint], requested: int) -> tuple[TopologyHint, ...]:
    """The same hints, and those preferred, too, that touch exactly as many sockets as the least number of nodes fills."""
    sizes = sorted(map(len, cpus.in_node.values()), reverse=True)
    least = next((size for size in range(1, len(sizes)) if sum(sizes[:size]) >= requested), len(sizes))
    nodes_per_socket = cpus.nodes // cpus.sockets if cpus.sockets else 0
    sockets = -(-least // nodes_per_socket) if nodes_per_socket else 0
    return tuple(
        TopologyHint(hint.affinity, hint.preferred or sockets_touched(cpus, mask_of_hint(hint)) == sockets)
        for hint in hints
    )


def sockets_touched(cpus: CpuTopology, mask: Mask) -> int:
    touched: set[int] = set()
    return len(touched.union(*(sockets for node, sockets in cpus.sockets_of_node.items() if mask >> node & 1)))


def mask_of_hint(hint: TopologyHint) -> Mask:
    """The hints made here always name nodes."""
    return hint.affinity or 0


def possible(
    cpus: CpuTopology, available: Set[int], reusable: Set[int], requested: int, mode: Mode, machine: int
) -> tuple[TopologyHint, ...] | HintRule:
    nodes = mask_of(cpus.in_node)
    free = Counter(1 << cpus.node_of[cpu] for each in (available, reusable) for cpu in each)
    obligatory = sorted({1 << cpus.node_of[cpu] for cpu in reusable})
    now = (Need(requested, dict(free)), *(Need(1, {node: 1}) for node in obligatory))
    empty = (Need(requested, {1 << node: len(inside) for node, inside in cpus.in_node.items()}),)
    return hints_from(Supply(nodes, now), Supply(nodes, empty), mode, machine)
