"""Small machines, nodes and pods made by hand, for tests of the decision."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from fact_support import discovered, health_of, judged
from merge_reference import all_but_14, uneven

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import Allocation, AllocationGranted
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, DeviceID, NodeName, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, PluginDevice, Topology
from topoalign.core.state.fold import NodeState

NODE = NodeName("node-1")
GIB = 1 << 30


def machine(
    nodes: int = 2,
    cores: int = 4,
    threads: int = 2,
    gpus: Sequence[int | None] = (0, 0, 1, 1),
    nics: Sequence[int | None] = (0, 1),
    memory: int | None = 64 * GIB,
    bare_nodes: int = 0,
    others: tuple[PluginDevice, ...] = (),
) -> Topology:
    """
    One socket per NUMA node with `cores` cores; GPU and NIC i are near the node given, None where it is unknown.

    Devices of one node hang on one switch. `bare_nodes` more nodes have neither CPUs nor memory.
    """
    count = nodes * cores
    cpus = [
        Cpu(id=core + count * thread, core=core, socket=core // cores, node=core // cores, uncore=core // cores)
        for thread in range(threads)
        for core in range(count)
    ]
    near = {f"GPU-{i}": node for i, node in enumerate(gpus)} | {f"mlx5_{i}": node for i, node in enumerate(nics)}
    devices = list(near)
    return Topology(
        cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        nodes=tuple(NumaNode(id=i, memory=memory) for i in range(nodes))
        + tuple(NumaNode(id=nodes + i, memory=0) for i in range(bare_nodes)),
        distances=tuple(tuple(10 if i == j else 20 + abs(i - j) for j in range(nodes)) for i in range(nodes))
        if not bare_nodes
        else None,
        gpus=tuple(
            Gpu(id=DeviceID(f"GPU-{i}"), index=i, numa_affinity=() if node is None else (node,))
            for i, node in enumerate(gpus)
        ),
        nics=tuple(
            Nic(id=DeviceID(f"mlx5_{i}"), index=i, numa_affinity=() if node is None else (node,))
            for i, node in enumerate(nics)
        ),
        links=tuple(
            Link(a=DeviceID(a), b=DeviceID(b), pcie=PcieClass.PIX if near[a] == near[b] else PcieClass.SYS)
            for i, a in enumerate(devices)
            for b in devices[i + 1 :]
        ),
        others=others,
    )


def node(topology: Topology, unhealthy: Iterable[str] = (), name: NodeName = NODE) -> NodeState:
    """A node with this hardware, and all devices healthy but these."""
    health = health_of(topology, {*unhealthy})
    return NodeState(node=name).apply(discovered(topology, name)).apply(judged(health, name))


def container(
    name: str = "main",
    gpus: int = 0,
    cpus: float = 0,
    gib: int = 0,
    nics: int = 0,
    sidecar: bool = False,
    others: Mapping[str, int] | None = None,
) -> ContainerRequest:
    """A container whose requests equal its limits."""
    quantities = {GPU: gpus, CPU: int(cpus * 1000), MEMORY: gib * GIB, NIC: nics}
    quantities.update({ResourceName(resource): amount for resource, amount in (others or {}).items()})
    asked = {resource: amount for resource, amount in quantities.items() if amount}
    return ContainerRequest(name=ContainerName(name), requests=asked, limits=asked, sidecar=sidecar)


def pod(
    *containers: ContainerRequest,
    init: Sequence[ContainerRequest] = (),
    name: str = "pod-1",
    annotations: Mapping[str, str] = {},
) -> PodRequest:
    return PodRequest(
        name=PodName(name), annotations={**annotations}, init_containers=tuple(init), containers=containers
    )


def asking(state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules) -> HintRequest:
    """Asks for the hints of a container, or with None of the pod as a whole."""
    return HintRequest(state, read_pod(pod, rules).of(container), rules)


def admitted(decision: Decision) -> dict[str, Allocation]:
    """Container -> what it got."""
    assert isinstance(decision, Admission), decision
    return {each.owner.container: each for each in decision.allocations if each.owner is not None}


def refused(decision: Decision) -> Refusal:
    assert isinstance(decision, Refusal), decision
    return decision


def granted(state: NodeState, decision: Decision) -> NodeState:
    """The state after the facts that an admission leads to."""
    for allocation in admitted(decision).values():
        fact = AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=allocation)
        state = state.apply(fact)
    return state


def knapsack_machine() -> tuple[Topology, dict[ResourceName, int]]:
    """
    Memory and seven sizes of hugepages spread so unevenly over 64 NUMA nodes, and so much asked of each, that how few nodes
    do is not found within the limit on work.
    """
    names = [MEMORY, *(ResourceName(f"hugepages-{1 << size}Mi") for size in range(7))]
    each = {name: uneven(seed) for seed, name in enumerate(names)}
    pages = [{name: each[name][i] for name in names[1:]} for i in range(64)]
    nodes = [NumaNode(id=i, memory=each[MEMORY][i] + sum(pages[i].values()), hugepages=pages[i]) for i in range(64)]
    hostile = msgspec.structs.replace(machine(nodes=64), nodes=tuple(nodes))
    return hostile, {name: all_but_14(each[name]) for name in names}
