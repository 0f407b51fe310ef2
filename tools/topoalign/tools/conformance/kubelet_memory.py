"""The suites `kubelet/memory_hints` and `kubelet/memory_allocate`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.hints.memory_hints import memory_answer, memory_nodes
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import held_by_pod, live_allocations_of_pod, own_part, reusable_memory
from topoalign.core.model.errors import NoFit, Undecodable, clean
from topoalign.core.model.events import Allocation, MemoryBlock, MemoryUse, Owner
from topoalign.core.model.ids import MEMORY, AllocationID, ContainerName, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.model.topology.model import NumaNode, Topology
from topoalign.core.placement.memory_blocks import hold_allocation, memory_for
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.kubelet_errors import Answer
from topoalign.tools.conformance.kubelet_merge import Hint, all_written
from topoalign.tools.conformance.kubelet_pods import Pod
from topoalign.tools.conformance.suite import CaseResult, Outcome


class Amounts(msgspec.Struct, frozen=True):
    """A memory table of a NUMA node, in bytes."""

    total: int
    system_reserved: int
    allocatable: int
    reserved: int
    free: int


class Node(msgspec.Struct, frozen=True):
    """A NUMA node with its tables, its group and its number of assignments."""

    id: int
    resources: dict[ResourceName, Amounts]
    cells: list[int]
    assignments: int


class Block(msgspec.Struct, frozen=True):
    """Memory of a container: NUMA nodes, resource, bytes."""

    nodes: tuple[int, ...]
    type: ResourceName
    size: int


Held = dict[ContainerName, list[Block]]


class MemoryCase(msgspec.Struct, frozen=True):
    """The common fields of a case."""

    id: str
    numa_nodes: list[Node]
    pod: Pod
    held_blocks: Held = {}
    level: Literal["container", "pod"] = "container"
    reusable: list[Block] | None = None
    """What the blocks held leave to the pod's next containers; not looked at where a case does not say it."""
    container: ContainerName | None = None


class HintsExpected(msgspec.Struct, frozen=True):
    """The expected hints by resource; None means no preference."""

    hints: dict[ResourceName, list[Hint]] | None


class HintsCase(MemoryCase, frozen=True, kw_only=True):
    """A case of `kubelet/memory_hints`."""

    expect: HintsExpected


def hints(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/memory_hints`."""
    return results(path, HintsCase, hinted)


def hinted(case: HintsCase) -> Outcome:
    """Expected and actual hints of a case."""
    state, pod, rules = situation(case)
    demand = pod_demand(pod, rules)
    asked = HintRequest(state, demand.of(case.container if case.level == "container" else None), rules)
    answer = memory_answer(asked) if demand.manages_memory else None
    got = None if answer is None else {name: all_written(each) for name, each in answer.items()}
    return case.expect.hints, got


class AllocateExpected(Answer, frozen=True):
    """The expected blocks and tables, or the error."""

    blocks: list[Block] | None = None
    held_blocks_after: Held | None = None
    reusable_after: list[Block] | None = None
    numa_nodes_after: list[Node] | None = None


class AllocateCase(MemoryCase, frozen=True, kw_only=True):
    """A case of `kubelet/memory_allocate`."""

    hint: Hint
    expect: AllocateExpected


def allocate(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/memory_allocate`."""
    return results(path, AllocateCase, lambda case: (case.expect.by_kind, allocated(case)))


def allocated(case: AllocateCase) -> AllocateExpected:
    """Gives the container its memory and looks at the state afterwards."""
    state, pod, rules = situation(case)
    demand = next(each for each in pod_demand(pod, rules).containers if each.container == case.container)
    try:
        blocks = memory_for(state, demand, case.hint.read, rules)
    except NoFit as misfit:
        return AllocateExpected(error=misfit.code)
    earlier = held_by_pod(state, demand)
    if blocks and not own_part(earlier, demand):
        state = hold_allocation(state, allocation(pod, demand.container, blocks), earlier)
    held = {each.owner.container: written(each.memory) for each in held_by_pod(state, demand) if each.owner}
    return AllocateExpected(
        blocks=written(blocks) or None,
        held_blocks_after=held,
        reusable_after=reusable(state, pod),
        numa_nodes_after=nodes_after(case, state, rules),
    )


def situation(case: MemoryCase) -> tuple[NodeState, PodRequest, AdmissionRules]:
    """The state, the pod and the rules of a case. Raises Undecodable for one that contradicts itself."""
    nodes = tuple(
        NumaNode(
            id=node.id,
            memory=node.resources[MEMORY].total if MEMORY in node.resources else None,
            hugepages={name: each.total for name, each in node.resources.items() if name != MEMORY},
        )
        for node in case.numa_nodes
    )
    use = {
        node.id: MemoryUse(
            reserved={name: each.reserved for name, each in node.resources.items()},
            cells=tuple(node.cells),
            assignments=node.assignments,
        )
        for node in case.numa_nodes
    }
    reserved = {node.id: {n: each.system_reserved for n, each in node.resources.items()} for node in case.numa_nodes}
    pod = case.pod.read
    allocations = [
        allocation(
            pod,
            container.name,
            tuple(
                MemoryBlock(
                    resource=block.type,
                    nodes=block.nodes,
                    size=block.size,
                    taken=(block.size, *[0] * (len(block.nodes) - 1)),
                )
                for block in case.held_blocks[container.name]
            ),
        )
        for container in (*pod.init_containers, *pod.containers)
        if container.name in case.held_blocks
    ]
    machine = initial_state(NodeName("case"), Topology(nodes=nodes), {}, "described: case")
    state = replace(machine, allocations={each.id: each for each in allocations}, memory=use)
    left = reusable(state, pod)
    if case.reusable is not None and left != in_order(case.reusable):
        raise Undecodable(clean(case.id), f"reusable is not what held_blocks leave, {clean(repr(left), 200)}")
    return state, pod, AdmissionRules(mode=Mode.KUBELET, reserved_memory=reserved)


def reusable(state: NodeState, pod: PodRequest) -> list[Block]:
    """What the pod's finished init containers leave to its next containers."""
    left = reusable_memory(live_allocations_of_pod(state, pod.namespace, pod.name))
    return in_order(Block(nodes_of(group), name, size) for (group, name), size in left.items())


def in_order(blocks: Iterable[Block]) -> list[Block]:
    """Blocks by NUMA nodes and resource, so that lists can be compared."""
    return sorted(blocks, key=lambda block: (block.nodes, block.type))


def allocation(pod: PodRequest, container: ContainerName, blocks: tuple[MemoryBlock, ...]) -> Allocation:
    """The allocation of a container that holds these blocks."""
    plain = any(each.name == container and not each.sidecar for each in pod.init_containers)
    return Allocation(
        id=AllocationID(container),
        owner=Owner(namespace=pod.namespace, pod=pod.name, container=container),
        role="init" if plain else "app",
        memory=blocks,
    )


def written(blocks: tuple[MemoryBlock, ...]) -> list[Block]:
    """Blocks in the fields of a case, in order."""
    return sorted((Block(block.nodes, block.resource, block.size) for block in blocks), key=lambda block: block.type)


def nodes_after(case: MemoryCase, state: NodeState, rules: AdmissionRules) -> list[Node]:
    """The tables of all NUMA nodes in the fields of a case."""
    after = memory_nodes(state, rules)
    nodes = []
    for node in case.numa_nodes:
        now = after[node.id]
        use = state.memory[node.id]
        resources = {
            name: replace(
                had, allocatable=now.allocatable[name], reserved=use.reserved.get(name, 0), free=now.free[name]
            )
            for name, had in node.resources.items()
        }
        nodes.append(Node(id=node.id, resources=resources, cells=list(use.cells), assignments=use.assignments))
    return nodes
