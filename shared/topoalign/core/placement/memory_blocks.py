"""
Chooses the NUMA nodes of a container's memory and hugepages (kubelet v1.36.3, memory manager, Static).

The rule: memory comes from the nodes of the merged affinity if they have enough free, otherwise from the best hint of the
memory manager that contains it. Without an affinity, memory comes from the best hint of the memory manager. A group of
nodes is refused if one of its nodes is in use in another group.

Memory that a plain init container of the pod held is reused by later containers on exactly the same group of nodes.
Then it belongs to them: `hold_allocation` moves it from the init container's blocks to theirs. So each byte is counted
once, and is released with the container that holds it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.hints.hint_rules import narrowest_hint
from topoalign.core.hints.memory_hints import (
    MemoryNodes,
    enough_for,
    groups_agree,
    memory_hints,
    memory_nodes,
    memory_numa_nodes,
)
from topoalign.core.hints.reuse import ReusableMemory, held_by_pod, own_part, reusable_memory
from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.errors import NoFit
from topoalign.core.model.events import Allocation, MemoryBlock
from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState

RELEASE = "ask for less memory, or wait until a container with memory of these NUMA nodes has ended"


class NotEnoughMemory(NoFit):
    """Raised when no set of NUMA nodes that can be used together has enough free memory."""

    def __init__(self, request: Mapping[ResourceName, int]) -> None:
        super().__init__(f"no NUMA nodes that may be used together have {_describe_memory(request)} free", RELEASE)


class MemoryNotPreferred(NoFit):
    """Raised when other resources are aligned, but memory needs more NUMA nodes than on an empty machine."""

    def __init__(self, request: Mapping[ResourceName, int], nodes: Mask) -> None:
        super().__init__(
            f"{_describe_memory(request)} fit only on more NUMA nodes than preferred: {_node_list(nodes)}", RELEASE
        )


class MemoryNotExtendable(NoFit):
    """Raised when the nodes to which other resources are aligned have too little memory, even with any other nodes."""

    def __init__(self, request: Mapping[ResourceName, int], nodes: Mask) -> None:
        super().__init__(
            f"no group of NUMA nodes around {_node_list(nodes)} has {_describe_memory(request)} free", RELEASE
        )


class MemoryExtensionNotPreferred(NoFit):
    """Raised when the nodes of other resources have too little memory, and only a non-preferred group has enough."""

    def __init__(self, request: Mapping[ResourceName, int], nodes: Mask, wider: Mask) -> None:
        super().__init__(
            f"NUMA nodes {_node_list(nodes)} are preferred, and only the wider {_node_list(wider)} have "
            f"{_describe_memory(request)} free",
            RELEASE,
        )


class MemoryGroupsWouldMix(NoFit):
    """
    Raised when another container uses a part of the needed group of NUMA nodes.

    Remedy: Wait until that container ends, or ask for memory of one NUMA node.
    """

    def __init__(self, nodes: Mask) -> None:
        super().__init__(
            f"memory of NUMA nodes {_node_list(nodes)} cannot be used as one group: a container uses part of them otherwise",
            "wait until that container has ended, or ask for memory that fits on one NUMA node",
        )


def memory_for(
    state: NodeState, demand: ContainerDemand, affinity: TopologyHint, rules: AdmissionRules
) -> tuple[MemoryBlock, ...]:
    """The blocks of a container that was aligned to `affinity`. Raises one of this module's errors, and TooMuchWork."""
    held = held_by_pod(state, demand)
    request = demand.memory
    blocks = next((each.memory for each in own_part(held, demand) if each.memory), ())
    if blocks or not request:
        return blocks
    nodes = memory_nodes(state, rules)
    reusable = reusable_memory(held)
    offered = memory_numa_nodes(state.hardware, rules.mode)
    own_hints = partial(memory_hints, nodes, offered, request, reusable, rules.mode)
    return choose_memory(nodes, request, reusable, affinity, own_hints, rules.mode)


def choose_memory(
    nodes: MemoryNodes,
    request: Mapping[ResourceName, int],
    reusable: ReusableMemory,
    affinity: TopologyHint,
    own_hints: Callable[[], tuple[TopologyHint, ...] | HintRule],
    mode: Mode = Mode.KUBELET,
) -> tuple[MemoryBlock, ...]:
    """
    One block per requested resource. `taken` is the memory that is needed in addition to reusable memory, which
    `hold_allocation` adds. `own_hints` returns the memory manager's hints for this request. As in the kubelet, the
    affinity has enough if enough is free. In mode `best`, reusable memory counts, too. Raises this module's errors.
    """
    group = _memory_group(
        nodes, request, reusable if profile_of(mode).counts_reusable_memory else {}, affinity, own_hints
    )
    members = nodes_of(group)
    blocks = []
    for name, size in request.items():
        anew = size - min(size, reusable.get((group, name), 0))
        taken = from_lowest([nodes[node].free.get(name, 0) for node in members], anew)
        blocks.append(MemoryBlock(resource=name, nodes=members, size=size, taken=taken))
    return tuple(blocks)


def _memory_group(
    nodes: MemoryNodes,
    request: Mapping[ResourceName, int],
    counted: ReusableMemory,
    affinity: TopologyHint,
    own_hints: Callable[[], tuple[TopologyHint, ...] | HintRule],
) -> Mask:
    """The nodes from which the memory is allocated. `counted`: reusable memory that counts as free."""
    if affinity.affinity is None:
        own = narrowest_hint(own_hints())
        if own is None:
            raise NotEnoughMemory(request)
        hint = own
        group = _nodes_named(own)
        if affinity.preferred and not own.preferred:
            raise MemoryNotPreferred(request, group)
    else:
        hint = affinity
        group = affinity.affinity
    if not enough_for(nodes, request, counted, group):
        wider = narrowest_hint(own_hints(), around=group)
        if wider is None:
            raise MemoryNotExtendable(request, group)
        if hint.preferred and not wider.preferred:
            raise MemoryExtensionNotPreferred(request, group, _nodes_named(wider))
        group = _nodes_named(wider)
    if group.bit_count() > 1 and not groups_agree(nodes, group):
        raise MemoryGroupsWouldMix(group)
    return group


def _nodes_named(hint: TopologyHint) -> Mask:
    return hint.affinity or 0  # the memory manager's own hints always name nodes


def from_lowest(amounts: Sequence[int], wanted: int) -> tuple[int, ...]:
    """The parts of the amounts that make up `wanted`. The first amounts are used up first."""
    parts = []
    for amount in amounts:
        parts.append(min(amount, wanted))
        wanted -= parts[-1]
    return tuple(parts)


def hold_allocation(state: NodeState, allocation: Allocation, earlier: Iterable[Allocation]) -> NodeState:
    """
    The state with the allocation, which has taken over the memory that it reuses from `earlier` ones of its pod. The
    live allocations of this state are published: folded in their order, they result in the same use of memory.
    """
    after = state.holding(allocation)
    live = dict(after.allocations)
    for donor in (each.id for each in earlier if each.role == "init" and each.memory and allocation.memory):
        live[donor], live[allocation.id] = hand_over_blocks(live[donor], live[allocation.id])
    return msgspec.structs.replace(after, allocations=live)


def hand_over_blocks(giver: Allocation, taker: Allocation) -> tuple[Allocation, Allocation]:
    """Both allocations, after the taker's blocks got their missing memory from the giver's blocks on the same nodes."""
    given = list(giver.memory)
    taken = list(taker.memory)
    for i, had in enumerate(given):
        for j, needs in enumerate(taken):
            lacks = needs.size - sum(needs.taken)
            if lacks and (had.resource, had.nodes) == (needs.resource, needs.nodes):
                parts = from_lowest(had.taken, lacks)
                left = tuple(amount - part for amount, part in zip(had.taken, parts, strict=True))
                got = tuple(amount + part for amount, part in zip(needs.taken, parts, strict=True))
                given[i] = msgspec.structs.replace(had, size=had.size - sum(parts), taken=left)
                taken[j] = msgspec.structs.replace(needs, taken=got)
    return msgspec.structs.replace(giver, memory=tuple(given)), msgspec.structs.replace(taker, memory=tuple(taken))


def _describe_memory(request: Mapping[ResourceName, int]) -> str:
    return " and ".join(f"{format_gib(size)} GiB of {name}" for name, size in request.items())


def format_gib(size: int) -> str:
    """Formats bytes in GiB: `64`, `1007.56`."""
    return f"{size / GIB:.6g}"


def _node_list(nodes: Mask) -> str:
    return format_cpuset(nodes_of(nodes))
