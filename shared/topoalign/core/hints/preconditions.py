"""
Checks that the data of a node is sufficient for a decision about a pod.

A wrong prediction is worse than none. So the pod is refused if the topology lacks data that the request needs, or if a
kubelet would not start with these rules. The reason names the cause.
"""

from collections.abc import Collection

from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.demand.shares import amount_resources
from topoalign.core.demand.unserved import check_not_passed_over
from topoalign.core.deviceshare.demand import RESOURCES
from topoalign.core.deviceshare.node_devices import check_shares_offered
from topoalign.core.hints.reuse import held_by_pod
from topoalign.core.model.errors import NoFit, clean, quoted
from topoalign.core.model.ids import MEMORY, ResourceName, is_hugepages
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.subsets import TooManyNumaNodes
from topoalign.core.policy import POLICIES
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState

LARGEST_NODE_ID = 63
"""The kubelet's masks have 64 bits."""
MOST_WALKED = 24
"""NUMA nodes. With more, going through their subsets would take the kubelet minutes for each pod."""


class TopologyUnknown(NoFit):
    """
    Raised when the hardware of the node is not known yet.

    Remedy: Read the log of discovery on the node.
    """

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the hardware of node {clean(node)} is not known yet",
            "start the discovery service on the node, or wait until it has read the hardware",
        )


class PodHasAllocations(NoFit):
    """
    Raised when a pod of this name already holds devices, CPUs or memory of the node.

    Remedy: Release them first, or use another name for the pod.
    """

    def __init__(self, demand: PodDemand) -> None:
        super().__init__(
            f"pod {demand.namespace}/{demand.pod} already has allocations on this node",
            "release them first, or give the new pod another name",
        )


class UnknownResource(NoFit):
    """
    Raised when the node does not offer the resource.

    Remedy: Ask for a resource that it has, or choose another node.
    """

    def __init__(self, resource: ResourceName, known: list[ResourceName]) -> None:
        super().__init__(
            f"this node has no resource {quoted([resource])}",
            f"ask for what it has: {quoted(known, most=20)}" if known else "ask a node that has it",
        )


class MemoryUnknown(NoFit):
    """Memory is requested, but the description of the machine does not have its size."""

    def __init__(self) -> None:
        super().__init__(
            "how much memory the NUMA nodes have is not known",
            "ask without memory, or describe the machine with it (lstopo XML, a sysfs tree, our JSON)",
        )


class DistancesUnknown(NoFit):
    """The closest NUMA nodes are preferred, but their distances are unknown."""

    def __init__(
        self,
        finding: str = "prefer_closest_numa_nodes is on, and the distances between the NUMA nodes are not known",
        remedy: str = "describe the machine with its distances (lstopo XML, a sysfs tree), or switch the option off",
    ) -> None:
        super().__init__(finding, remedy)


class NumaIdsSparse(NoFit):
    """
    Raised when the kubelet would panic over gaps in the ids of NUMA nodes.

    Remedy: Switch `prefer-closest-numa-nodes` off.
    """

    def __init__(self, highest: int, nodes: int) -> None:
        super().__init__(
            "prefer-closest-numa-nodes is on, and the kubelet "
            f"looks for NUMA node {highest} in lists of {nodes} distances: "
            "it would neither admit nor refuse the pod, but end in a panic",
            "switch prefer-closest-numa-nodes off on machines whose NUMA node ids have gaps",
        )


def check_decidable(state: NodeState, demand: PodDemand) -> None:
    """Raises a subclass of NoFit if a decision about this pod on this node is not possible."""
    if state.topology is None:
        raise TopologyUnknown(state.node)
    if held_by_pod(state, demand):
        raise PodHasAllocations(demand)
    topology = state.hardware
    rules = demand.rules
    if not profile_of(rules.mode).asks_by_koordinators_names:
        check_not_passed_over(demand)
    _check_cpu_manager_starts(topology, rules)
    _check_memory_manager_starts(topology, rules)
    _check_numa_nodes(topology, demand)
    _check_distances(topology, demand)
    for container in demand.containers:
        if container.joint is not None:
            check_shares_offered(topology, container.joint)
    for container in demand.containers:
        if profile_of(rules.mode).refuses_unknown_resources:
            check_resources_known(topology, container, RESOURCES if demand.jointly else ())
        asks_for_memory = demand.manages_memory and container.asked.get(MEMORY)
        if asks_for_memory and all(node.memory is None for node in topology.nodes):
            raise MemoryUnknown
    _check_hugepages_known(topology, demand)


def _check_numa_nodes(topology: Topology, demand: PodDemand) -> None:
    """Raises TooManyNumaNodes if the Topology Manager cannot start, or without it the memory manager cannot finish."""
    rules = demand.rules
    aligns = POLICIES[rules.policy].asks
    if not profile_of(rules.mode).starts_kubelet or not (aligns or demand.manages_memory):
        return
    if aligns and len(topology.nodes) > rules.max_allowable_numa_nodes:
        raise TooManyNumaNodes(
            f"the kubelet does not start on {len(topology.nodes)} NUMA nodes: "
            f"it allows {rules.max_allowable_numa_nodes}",
            "raise the kubelet's max-allowable-numa-nodes, use policy none there, or decide in mode best",
        )
    if not aligns and len(topology.nodes) > MOST_WALKED:
        raise TooManyNumaNodes(
            f"the kubelet's memory manager would go through all subsets of {len(topology.nodes)} NUMA nodes",
            "use memory manager policy None in the kubelet, or mode best where topoalign decides itself",
        )
    if any(node > LARGEST_NODE_ID for node in topology.node_ids):
        raise TooManyNumaNodes(
            f"NUMA node {max(topology.node_ids)} is beyond {LARGEST_NODE_ID}, the last that the kubelet can name",
            "use policy none and memory manager policy None in the kubelet, or mode best where topoalign decides itself",
        )


def _check_distances(topology: Topology, demand: PodDemand) -> None:
    """
    Raises DistancesUnknown and NumaIdsSparse. The kubelet looks up the distance between two NUMA nodes by their ids in
    a list that has one entry per node, without gaps (v1.36.3, topologymanager, CalculateAverageFor). It does so only
    under best-effort and restricted, and only for pods with hints.
    """
    rules = demand.rules
    policy = POLICIES[rules.policy]
    profile = profile_of(rules.mode)
    prefers = rules.prefer_closest_numa_nodes
    if not policy.asks or not (prefers or profile.always_compares_distances):
        return
    if prefers and topology.distances is None:
        raise DistancesUnknown
    # local readers produce only square tables, but topologies are also received from the message bus
    size = len(topology.nodes)
    rows = topology.distances if topology.distances is not None else ((0,) * size,) * size
    if len(rows) != size or any(len(row) != size for row in rows):
        raise DistancesUnknown(
            f"the distances between the {size} NUMA nodes are not a table of {size} rows of {size}",
            "see that discovery is of this version, or describe the machine with a row and a column for each node",
        )
    highest = max(topology.node_ids, default=0)
    has_hints = demand.cpus or demand.memory or demand.devices
    if profile.starts_kubelet and has_hints and not policy.single_node and highest >= size > 0:
        raise NumaIdsSparse(highest, size)


def check_resources_known(
    topology: Topology, container: ContainerDemand, besides: Collection[ResourceName] = ()
) -> None:
    """Raises UnknownResource. `besides`: other names under which devices of the node can be requested."""
    pages = {name for node in topology.nodes for name in node.hugepages}
    known = {*topology.devices, *amount_resources(topology), *pages, *besides}
    hugepages = (name for name, amount in container.asked.items() if amount and is_hugepages(name))
    devices = (name for name, amount in container.devices.items() if amount)
    for name in sorted((*hugepages, *devices)):
        if name not in known:
            raise UnknownResource(name, sorted(known))


class KubeletWouldNotStart(NoFit):
    """
    Raised when the kubelet would not start with these rules on this machine.

    Remedy: Correct the kubelet's configuration.
    """


def _check_cpu_manager_starts(topology: Topology, rules: AdmissionRules) -> None:
    """Raises KubeletWouldNotStart (kubelet v1.36.3, policy static). A machine without known CPUs is not checked."""
    if not topology.cpus or rules.cpu_manager == "none":
        return
    cpus = topology.cpu_topology
    unknown = parse_cpuset(rules.reserved_cpus) - cpus.node_of.keys()
    if unknown:
        raise KubeletWouldNotStart(
            f"reserved_cpus names CPUs that the machine does not have, {clean(format_cpuset(unknown))}: "
            "the kubelet does not start",
            f"reserve some of CPUs {clean(format_cpuset(cpus.node_of))}",
        )
    if not rules.reserved_cpus.strip() and rules.reserved_cpu_count > len(cpus.node_of):
        raise KubeletWouldNotStart(
            f"reserved_cpu_count is {rules.reserved_cpu_count}, and the machine has {len(cpus.node_of)} CPUs: "
            "the kubelet does not start",
            "reserve fewer CPUs",
        )
    if CpuOption.ALIGN_BY_SOCKET in rules.cpu_options and cpus.sockets > cpus.nodes:
        raise KubeletWouldNotStart(
            f"cpu_options has {CpuOption.ALIGN_BY_SOCKET.value}, and the machine has more sockets ({cpus.sockets}) than "
            f"NUMA nodes with CPUs ({cpus.nodes}): the kubelet does not start",
            "leave the option out on this machine",
        )


class HugepagesUnevenlyKnown(NoFit):
    """
    Raised for hugepages of a size that some NUMA nodes do not list.

    The kubelet's memory manager panics in this case.

    Remedy: Read the log of discovery on the node.
    """

    def __init__(self, resource: ResourceName, without: list[int]) -> None:
        size = clean(resource)
        super().__init__(
            f"{size} is asked for, and NUMA nodes {format_cpuset(without)} do not list this size: the kubelet would "
            "neither admit nor refuse the pod, but end in a panic",
            f"ask without {size}; if those nodes know the size and have none of its pages, give 0 bytes of it there",
        )


def _check_memory_manager_starts(topology: Topology, rules: AdmissionRules) -> None:
    """Raises KubeletWouldNotStart (kubelet v1.36.3, policy Static). Without known NUMA nodes, nothing is checked."""
    if not topology.nodes or rules.memory_manager == "None":
        return
    nodes = {node.id: node for node in topology.nodes}
    for number, amounts in sorted(rules.reserved_memory.items()):
        if not any(amounts.values()):
            continue
        if number not in nodes:
            raise KubeletWouldNotStart(
                f"reserved_memory names NUMA node {number}, which the machine does not have: the kubelet does not start",
                f"reserve memory of NUMA nodes {clean(format_cpuset(nodes))}",
            )
        node = nodes[number]
        there = node.hugepages if node.memory is None else {**node.hugepages, MEMORY: node.memory}
        for resource, size in sorted(amounts.items()):
            if size > there.get(resource, size):
                raise KubeletWouldNotStart(
                    f"reserved_memory keeps {size} bytes of {clean(resource)} of NUMA node {number}, which has "
                    f"{there[resource]}: no kubelet can run so",
                    "reserve less of this node, or the rest of other nodes",
                )


def _check_hugepages_known(topology: Topology, demand: PodDemand) -> None:
    """Raises HugepagesUnevenlyKnown, but only for decisions as the kubelet, because only the kubelet panics."""
    if not profile_of(demand.rules.mode).starts_kubelet:
        return
    for container in demand.containers:
        for name in container.memory:
            without = [node.id for node in topology.nodes if name not in node.hugepages]
            if is_hugepages(name) and without:
                raise HugepagesUnevenlyKnown(name, without)
