"""
Random machines, rules, nodes that hold something, and pods: for tests that compare verdicts with whole decisions, or check
which pods are admitted regardless of the order in which others end.
"""

from random import Random

import msgspec
from decision_support import GIB, machine, node

from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, AllocationID, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, CpuOption, Mode, PodRequest, Policy, Scope
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import NumaNode, PluginDevice, Topology
from topoalign.core.state.fold import NodeState
from topoalign.machines import catalogue

FPGA, PAGES = ResourceName("example.com/fpga"), ResourceName("hugepages-2Mi")
CPU_OPTIONS = (
    (),
    (),
    (CpuOption.STRICT_RESERVATION,),
    (CpuOption.FULL_PCPUS_ONLY,),
    (CpuOption.FULL_PCPUS_ONLY, CpuOption.DISTRIBUTE_ACROSS_NUMA),
    (CpuOption.DISTRIBUTE_ACROSS_NUMA,),
    (CpuOption.DISTRIBUTE_ACROSS_CORES,),
    (CpuOption.ALIGN_BY_SOCKET,),
    (CpuOption.PREFER_UNCORE, CpuOption.STRICT_RESERVATION),
)
Holders = dict[str, list[AllocationID]]
"""Name of a pod -> what it holds."""


def some_machine(random: Random) -> Topology:
    """Mostly a small one; devices near one NUMA node, near several, near none that is known, shared in time."""
    if random.random() < 0.15:
        found = catalogue.machine(random.choice(catalogue.names()))
    else:
        count = random.choice([1, 2, 2, 3, 4])
        places = [*range(count), *range(count), None]
        found = machine(
            nodes=count,
            cores=random.choice([2, 4]),
            gpus=random.choices(places, k=random.randrange(7)),
            nics=random.choices(places, k=random.randrange(4)),
            memory=random.choice([None, 16 * GIB, 64 * GIB, 64 * GIB]),
            bare_nodes=random.choice([0, 0, 0, 0, 1]),
        )
        if random.random() < 0.3:
            found = with_pages(random, found)
        if random.random() < 0.3:
            cpus = tuple(msgspec.structs.replace(cpu, socket=cpu.node // 2) for cpu in found.cpus)
            found = msgspec.structs.replace(found, cpus=cpus)
    if random.random() < 0.15 and found.cpus:
        offline = random.sample(found.cpus, random.randrange(1, 3))
        found = msgspec.structs.replace(found, cpus=tuple(cpu for cpu in found.cpus if cpu not in offline))
    if random.random() < 0.3 and found.gpus:
        found = msgspec.structs.replace(found, offers=some_offers(random, found))
    if random.random() < 0.2:
        found = msgspec.structs.replace(found, others=some_others(random))
    return found


def with_pages(random: Random, hardware: Topology) -> Topology:
    """The machine with hugepages on its NUMA nodes, as a rule on all of them."""

    def changed(had: NumaNode) -> NumaNode:
        pages = {} if random.random() < 0.05 else {PAGES: random.choice([0, 2, 4]) * GIB}
        return msgspec.structs.replace(had, hugepages=pages if had.memory else {PAGES: 0})

    return msgspec.structs.replace(hardware, nodes=tuple(map(changed, hardware.nodes)))


def some_offers(random: Random, hardware: Topology) -> tuple[Offer, ...]:
    """The GPUs shared in time, all or some of them, and the NICs."""
    gpus = [gpu.id for gpu in hardware.gpus]
    shared = gpus[: random.randrange(1, len(gpus) + 1)]
    offers = [
        Offer(
            resource=random.choice([GPU, ResourceName("nvidia.com/gpu.shared")]),
            devices=tuple(shared),
            replicas=random.choice([2, 3, 5]),
            most=random.choice([None, None, 1, 2]),
        ),
        Offer(resource=GPU, devices=tuple(gpu for gpu in gpus if gpu not in shared)),
        Offer(resource=NIC, devices=tuple(nic.id for nic in hardware.nics)),
    ]
    return tuple(offer for offer in offers if offer.devices)


def some_others(random: Random) -> tuple[PluginDevice, ...]:
    """Devices of another plugin; sometimes two resources with the same ids."""
    places: tuple[tuple[int, ...] | None, ...] = (None, (), (0,), (1,), (0, 1), (-1,), (7,))
    resources = random.choice([(FPGA,), (FPGA, ResourceName("example.com/other"))])
    return tuple(
        PluginDevice(id=DeviceID(f"f{number}"), resource=resource, nodes=random.choice(places))
        for resource in resources
        for number in range(random.randrange(1, 5))
    )


def some_rules(random: Random, hardware: Topology) -> AdmissionRules:
    """Rules of a kubelet; not all of them can be meant."""
    static = random.random() < 0.7
    keeps = hardware.nodes and hardware.nodes[0].memory and random.random() < 0.5
    return AdmissionRules(
        mode=Mode.KUBELET,
        policy=random.choice([*Policy, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]),
        scope=random.choice([*Scope]),
        cpu_manager="static" if static else "none",
        cpu_options=frozenset(random.choice(CPU_OPTIONS)) if static else frozenset(),
        reserved_cpus=random.choice(["", "0", "0,1", "5"]) if static else "",
        reserved_cpu_count=random.choice([0, 1, 2, 3]) if static else 0,
        memory_manager=random.choice(["None", "Static"]),
        reserved_memory={0: {MEMORY: GIB}} if keeps else {},
        prefer_closest_numa_nodes=random.random() < 0.15,
        max_allowable_numa_nodes=random.choice([8, 8, 8, 40]),
    )


def some_container(random: Random, hardware: Topology, name: str, *, sidecar: bool = False) -> ContainerRequest:
    """A container that asks for what the machine may have; with limits as requests, so that its CPUs can be its own."""
    asked: dict[ResourceName, int] = {}
    for resource, devices in (*hardware.devices.items(), (ResourceName("example.com/unknown"), ())):
        if random.random() < (0.45 if devices else 0.05):
            asked[resource] = min(random.choice([0, 1, 1, 1, 2, 2, 3, 4, 8]), len(devices) + 1)
    if random.random() < 0.8:
        asked[CPU] = random.choice([1000, 1000, 1500, 2000, 3000, 4000, 8000, 12000, 40000])
        asked[MEMORY] = random.choice([1, 4, 12, 14, 20, 40, 70, 90, 300]) * GIB
        if random.random() < 0.15:
            asked[PAGES] = random.choice([0, 1, 3]) * GIB
    return ContainerRequest(name=ContainerName(name), requests=asked, limits=asked, sidecar=sidecar)


def some_pod(random: Random, hardware: Topology, name: str = "p") -> PodRequest:
    """As a rule of one container that asks for something."""
    count, first = random.choice([1, 1, 1, 1, 2, 2, 3]), random.choice([0, 0, 0, 0, 1, 2])
    init = tuple(some_container(random, hardware, f"i{at}", sidecar=random.random() < 0.4) for at in range(first))
    containers = [some_container(random, hardware, f"c{at}") for at in range(count)]
    if random.random() < 0.4:
        small = {CPU: 100, MEMORY: GIB} if random.random() < 0.7 else {}
        containers[1:] = (ContainerRequest(name=each.name, requests=small, limits=small) for each in containers[1:])
    return PodRequest(name=PodName(name), init_containers=init, containers=tuple(containers))


def some_node(random: Random, hardware: Topology, rules: AdmissionRules) -> NodeState:
    """A node on which pods were admitted under these or laxer rules, and some of them ended."""
    cards = {hardware.parent_of(device) for devices in hardware.devices.values() for device in devices}
    state = node(hardware, [card for card in sorted(cards) if random.random() < 0.07])
    lax = msgspec.structs.replace(rules, policy=random.choice([rules.policy, Policy.BEST_EFFORT]))
    for number in range(random.choice([0, 1, 2, 3, 5, 8])):
        demand = demand_of(some_pod(random, hardware, f"q{number}"), lax)
        admitted = with_pod(state, demand) if demand is not None else None
        state = admitted[0] if admitted is not None else state
    for held in list(state.allocations):
        if random.random() < 0.35:
            state = state.without(held)
    return state


def demand_of(request: PodRequest, rules: AdmissionRules) -> PodDemand | None:
    """What a pod asks for under these rules. None: they cannot be meant together."""
    try:
        return read_pod(request, rules)
    except InvalidField:
        return None


def with_pod(state: NodeState, demand: PodDemand) -> tuple[NodeState, list[AllocationID]] | None:
    """The node after it has admitted a pod, and what this holds. None: it refuses the pod."""
    decision = decide_demand(state, demand)
    if not isinstance(decision, Admission):
        return None
    for each in decision.allocations:
        state = state.holding(each)
    return state, [each.id for each in decision.allocations]


def held_by(state: NodeState, pods: list[PodDemand | None], chance: Random) -> tuple[NodeState, Holders]:
    """The node with those of these pods that it admits and that have not ended since."""
    holders: Holders = {}
    for each in pods:
        admitted = with_pod(state, each) if each is not None else None
        if each is not None and admitted is not None:
            state, holders[each.pod] = admitted
    for name in [*holders]:
        if chance.random() < 0.35:
            for each_id in holders.pop(name):
                state = state.without(each_id)
    return state, holders


def refused_after_ends(state: NodeState, pods: list[PodDemand], holders: Holders, chance: Random) -> bool:
    """
    Whether some pod is refused when they come in a random order and some holders end: each one alone, and some random sets
    of them.
    """
    ends = [[name] for name in holders] + [
        chance.sample([*holders], chance.randrange(len(holders) + 1)) for _ in "12345"
    ]
    for ended in ends:
        after, coming = state, chance.sample(pods, len(pods))
        ending = chance.randrange(len(pods))
        for place, each in enumerate(coming):
            for each_id in [each_id for name in ended for each_id in holders[name]] if place == ending else ():
                after = after.without(each_id)
            admitted = with_pod(after, each)
            if admitted is None:
                return True
            after, _ = admitted
    return False
