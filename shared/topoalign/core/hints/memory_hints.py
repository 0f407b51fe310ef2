"""
Finds the NUMA nodes with enough memory and hugepages (kubelet v1.36.3, memory manager, policy Static).

A NUMA node is used either alone or in one group of nodes at a time. A node in a group is not offered alone. A node with
memory in use is offered in a group only if exactly this group uses it.
"""

from collections.abc import Mapping, Set

import msgspec

from topoalign.core.hints.hint_rules import Supply, hints_from
from topoalign.core.hints.provider import HintProvider, HintRequest, Largest
from topoalign.core.hints.reuse import ReusableMemory, held_by_pod, own_part, reusable_memory
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.hints import HintRule, ProviderHints, ResourceNeed, TopologyHint
from topoalign.core.model.ids import MEMORY, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.bitmask import Mask, node_mask, nodes_of
from topoalign.core.model.topology.model import NumaNode, Topology
from topoalign.core.numa_sets.search import mask_meets_needs
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState


class MemoryNode(msgspec.Struct, frozen=True):
    """One NUMA node in the memory manager. Amounts are bytes by resource. A resource that the node lacks is absent."""

    allocatable: Mapping[ResourceName, int]
    free: Mapping[ResourceName, int]
    group: Mask
    """The nodes with which it was last allocated. Initially, only the node itself."""
    used: bool
    """Whether a container holds memory of the node."""


MemoryNodes = Mapping[int, MemoryNode]
"""By NUMA node id, ascending."""


def memory_nodes(state: NodeState, rules: AdmissionRules) -> dict[int, MemoryNode]:
    """All NUMA nodes of the machine."""
    return {
        node.id: memory_node(node, rules.reserved_memory.get(node.id, {}), state.memory.get(node.id, MemoryUse()))
        for node in state.hardware.nodes
    }


def memory_node(node: NumaNode, reserved: Mapping[ResourceName, int], use: MemoryUse) -> MemoryNode:
    """The allocatable amounts of a node, and how much of them is free."""
    totals = dict(node.hugepages)
    if node.memory is not None:
        # all hugepages are subtracted from its memory, in use or not, because the kernel reserves them
        totals[MEMORY] = node.memory - sum(node.hugepages.values())
    allocatable = {name: max(0, total - reserved.get(name, 0)) for name, total in totals.items()}
    free = {name: max(0, amount - use.reserved.get(name, 0)) for name, amount in allocatable.items()}
    return MemoryNode(allocatable, free, node_mask(use.cells or (node.id,)), use.assignments > 0)


def memory_numa_nodes(topology: Topology, mode: Mode) -> tuple[int, ...]:
    """The NUMA nodes whose memory can be offered. In mode `best`, nodes without CPUs (GPU memory, CXL) are excluded."""
    if profile_of(mode).offers_memory_without_cpus:
        return topology.node_ids
    return tuple(node.id for node in topology.nodes if node.memory and node.id in topology.cpus_by_node)


def memory_hints(
    nodes: MemoryNodes,
    offered: tuple[int, ...],
    request: Mapping[ResourceName, int],
    reusable: ReusableMemory,
    mode: Mode,
) -> tuple[TopologyHint, ...] | HintRule:
    """The subsets of the `offered` nodes that meet the whole request. They apply to each of its resources."""
    everywhere = node_mask(offered)
    unused = [node for node in offered if not nodes[node].used]
    now = [ResourceNeed(size, {1 << n: nodes[n].free.get(name, 0) for n in unused}) for name, size in request.items()]
    empty = [
        ResourceNeed(size, {1 << n: nodes[n].allocatable.get(name, 0) for n in offered})
        for name, size in request.items()
    ]
    if any(nodes[node].group.bit_count() > 1 for node in unused):
        now.append(ResourceNeed(2, {1 << node: 2 if nodes[node].group.bit_count() == 1 else 1 for node in unused}))
    in_use = [node for node in offered if nodes[node].used]
    # Reusable memory counts only if its group is exactly the subset. Unlike reusable CPUs and devices, it forces no
    # subset.
    besides = [
        group
        for group in {nodes[n].group for n in in_use} | {1 << n for n in in_use} | {group for group, _ in reusable}
        if not group & ~everywhere
        and groups_agree(nodes, group)
        and mask_meets_needs(empty, group)
        and enough_for(nodes, request, reusable, group)
    ]
    return hints_from(
        Supply(node_mask(unused), tuple(now)), Supply(everywhere, tuple(empty)), mode, len(nodes), besides
    )


def enough_for(nodes: MemoryNodes, request: Mapping[ResourceName, int], reusable: ReusableMemory, group: Mask) -> bool:
    """Whether this group meets the whole request, including memory that the pod can reuse there."""
    members = [nodes[node] for node in nodes_of(group)]
    return all(
        sum(node.free.get(name, 0) for node in members) + reusable.get((group, name), 0) >= size
        for name, size in request.items()
    )


def groups_agree(nodes: MemoryNodes, mask: Mask) -> bool:
    """Whether each node of the mask is unused or in exactly this group. A single node must not be in a larger group."""
    members = [nodes[node] for node in nodes_of(mask)]
    if len(members) == 1:
        return members[0].group.bit_count() == 1
    return not any(member.used and member.group != mask for member in members)


def memory_answer(asked: HintRequest) -> ProviderHints | None:
    """The same hints for each resource of the demand. None: the container holds other memory than it requests."""
    state, demand, rules = asked
    if not demand.memory:
        return {}
    held = held_by_pod(state, demand)
    blocks = next((each.memory for each in own_part(held, demand) if each.memory), None)
    if blocks is not None:  # the same nodes if it requests the same amounts, else no preference
        if len(blocks) != len(demand.memory) or any(demand.memory.get(each.resource) != each.size for each in blocks):
            return None
        return {
            name: tuple(TopologyHint(node_mask(block.nodes), True) for block in blocks if block.resource == name)
            for name in demand.memory
        }
    hints = memory_hints(
        memory_nodes(state, rules),
        memory_numa_nodes(state.hardware, rules.mode),
        demand.memory,
        reusable_memory(held),
        rules.mode,
    )
    if not hints and profile_of(rules.mode).silent_on_unmet_memory:
        return {}
    return dict.fromkeys(demand.memory, hints)


class MemoryProvider(HintProvider):
    """The memory manager."""

    name = "memory"

    def hints(self, asked: HintRequest) -> ProviderHints:
        """The same hints for memory and each requested hugepage size."""
        return memory_answer(asked) or {}

    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        """Memory and hugepages that are requested from the memory manager."""
        return asked.demand.memory.keys()

    def may_be_silent(self, asked: HintRequest) -> bool:
        """For a request that fits nowhere, and for a container that holds memory and requests another amount."""
        held = held_by_pod(asked.state, asked.demand)
        return profile_of(asked.rules.mode).silent_on_unmet_memory or any(each.memory for each in held)

    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        """A need per resource, and one that keeps groups apart. `besides`: nodes in use, groups and reusable memory."""
        nodes = len(asked.state.hardware.nodes)
        left = sum(len(each.memory) for each in held_by_pod(asked.state, asked.demand))
        return Largest(len(asked.demand.memory) + 1, nodes, 2 * nodes + left)
