"""
Whether amounts decide about a pod of which several containers ask for something.

They do where the totals of the pod suffice, because it is aligned as one or admitted however it is aligned; and where it is
known after each container what is left on each NUMA node, because what it has is all on one.
"""

from collections.abc import Collection, Sequence

from topoalign.core.admission.preferred_sets import near
from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import CpuOption, Scope
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY

NOT_COUNTED = {CpuOption.FULL_PCPUS_ONLY}
"""Options of the CPU manager with which a number of CPUs does not tell which cores are left whole."""
NOT_NEAR = {CpuOption.FULL_PCPUS_ONLY, CpuOption.ALIGN_BY_SOCKET}
"""Those with which besides the CPUs may be of other NUMA nodes than the container is aligned to."""


def asks_alike(container: ContainerDemand, pod: PodDemand) -> bool:
    """Whether the pod as a whole asks for what one of its containers does."""
    return (container.devices, container.cpus, container.memory) == (pod.devices, pod.cpus, pod.memory)


def totals_decide(topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand]) -> bool:
    """Whether the containers are admitted where the totals suffice once they are aligned."""
    rules, policy = demand.rules, POLICIES[demand.rules.policy]
    if rules.scope is not Scope.POD and not policy.admits(NO_AFFINITY):
        return False
    if any(each.memory for each in asking):
        placed_as_one = rules.scope is Scope.POD and policy.asks
        left_over = any(each.memory and each.role == "init" for each in asking)
        whole = all(each.memory.keys() <= demand.memory.keys() for each in asking)
        if not placed_as_one or left_over or not whole:
            return False
    return are_counted(topology, demand, asking, rules.cpu_options & NOT_COUNTED)


def are_separable(topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand]) -> bool:
    """
    Whether each container can be judged by what those before it have left, where these are on one NUMA node each. Not where
    a resource has devices near one NUMA node and others near none or several: which of these it got is not known.
    """
    rules = demand.rules
    if rules.scope is Scope.POD or not POLICIES[rules.policy].asks or any(each.role == "init" for each in asking):
        return False
    for name in demand.device_names & topology.devices.keys():
        widths = {mask.bit_count() for mask in near(topology.devices[name].everything, topology.node_ids)}
        if len(widths) > 1 or max(widths) > 1:
            return False
    return are_counted(topology, demand, asking, rules.cpu_options & NOT_NEAR)


def are_counted(
    topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand], hindering: Collection[CpuOption]
) -> bool:
    """Whether as much is left after a container as it was not given, of CPUs and of each resource."""
    if any(each.cpus for each in asking) and (hindering or not topology.cpu_topology.is_even):
        return False
    return disjoint(*(topology.devices[name] for name in demand.device_names & topology.devices.keys()))


def disjoint(*some: Collection[DeviceID]) -> bool:
    """Whether no device is in two of these."""
    return len(frozenset().union(*some)) == sum(map(len, some))
