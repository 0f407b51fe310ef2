"""
Finds the NUMA nodes with enough exclusive CPUs (kubelet v1.36.3, CPU manager, policy static).

Hints are subsets of the NUMA nodes that have CPUs. A subset counts only if it contains all CPUs of the pod's finished
init containers, because the next container reuses them.

With align-by-socket, a subset is also preferred if it spans exactly as many sockets as the narrowest subset needs,
because the nodes of a socket then count as one. Mode `best` always prefers the narrowest subsets.
"""

from collections import Counter
from collections.abc import Sequence, Set
from itertools import chain

from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.hints.hint_rules import Supply, hints_from
from topoalign.core.hints.provider import HintProvider, HintRequest, Largest
from topoalign.core.hints.reuse import held_by_pod, own_part, reusable_cpus
from topoalign.core.model.hints import HintRule, Hints, ProviderHints, ResourceNeed, TopologyHint
from topoalign.core.model.ids import CPU, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.numa_sets.subsets import fewest_with, hints_of_rule
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState


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
    The hints for `requested` whole CPUs. `available`: CPUs of the shared pool that are not reserved. `reusable`: CPUs
    to reuse from init containers of the pod. `held`: CPUs that this container already has. `machine`: the number of
    NUMA nodes, including those without CPUs.
    """
    if held and len(held) != requested:
        return ()
    left = frozenset() if held else reusable
    # the subsets with enough CPUs that contain all CPUs to reuse from init containers
    nodes = node_mask(cpus.in_node)
    free = Counter(map(cpus.node_mask_of.__getitem__, chain(held or available, left)))
    obligatory = sorted({1 << cpus.node_of[cpu] for cpu in left})
    now = (ResourceNeed(requested, dict(free)), *(ResourceNeed(1, {node: 1}) for node in obligatory))
    empty = (ResourceNeed(requested, {1 << node: len(inside) for node, inside in cpus.in_node.items()}),)
    hints = hints_from(Supply(nodes, now), Supply(nodes, empty), mode, machine)
    if not by_socket or not profile_of(mode).aligns_by_socket:
        return hints
    return aligned_by_socket(cpus, hints_of_rule(hints) if isinstance(hints, HintRule) else hints, requested)


def aligned_by_socket(cpus: CpuTopology, hints: Sequence[TopologyHint], requested: int) -> tuple[TopologyHint, ...]:
    """The same hints. Hints that span exactly as many sockets as the fewest nodes fill are preferred, too."""
    least = fewest_with(map(len, cpus.in_node.values()), requested) or len(cpus.in_node)
    nodes_per_socket = cpus.nodes // cpus.sockets if cpus.sockets else 0
    sockets = -(-least // nodes_per_socket) if nodes_per_socket else 0

    def touches(mask: Mask) -> int:
        touched = (inside for node, inside in cpus.sockets_of_node.items() if mask >> node & 1)
        return len(frozenset[int]().union(*touched))

    return tuple(  # these hints always name nodes
        TopologyHint(hint.affinity, hint.preferred or touches(hint.affinity or 0) == sockets) for hint in hints
    )


def available_cpus(state: NodeState, rules: AdmissionRules) -> frozenset[int]:
    """The CPUs of the shared pool that are not reserved for the system. Raises NotEnoughCpus or TooMuchWork."""
    return shared_cpus(state, rules) - read_reserved_cpus(state.hardware, rules)


def shared_cpus(state: NodeState, rules: AdmissionRules) -> frozenset[int]:
    """The shared pool: CPUs that no container holds exclusively. Raises the same errors as `available_cpus`."""
    strict = CpuOption.STRICT_RESERVATION in rules.cpu_options
    kept = read_reserved_cpus(state.hardware, rules) if strict else frozenset()
    return state.hardware.cpu_topology.online - state.ownership.cpus_in_use - kept


class CpuProvider(HintProvider):
    """The CPU manager. It provides hints if exclusive CPUs are requested."""

    name = "cpu"

    def hints(self, asked: HintRequest) -> ProviderHints:
        """The hints for `cpu`."""
        state, demand, rules = asked
        if not demand.cpus:
            return {}
        cpus = state.hardware.cpu_topology
        held = held_by_pod(state, demand)
        hints = cpu_hints(
            cpus,
            available_cpus(state, rules),
            reusable_cpus(held) & cpus.node_of.keys(),
            demand.cpus,
            rules.mode,
            held=cpus.node_of.keys() & frozenset().union(*(each.cpu_ids for each in own_part(held, demand))),
            by_socket=CpuOption.ALIGN_BY_SOCKET in rules.cpu_options,
            machine=len(state.hardware.nodes),
        )
        return {CPU: hints}

    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        """`cpu`."""
        return {CPU} if asked.demand.cpus else set()

    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        """One need, and one more for each NUMA node if the pod already holds allocations."""
        nodes = len(asked.state.hardware.nodes)
        return Largest(1 + (nodes if held_by_pod(asked.state, asked.demand) else 0), max(1, nodes), 0)
