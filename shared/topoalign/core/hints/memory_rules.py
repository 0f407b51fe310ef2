"""
On which machines the memory manager starts and answers (kubelet v1.36.3, memory manager, policy Static).

The kubelet does not start where memory is kept of a NUMA node that is not there, and it ends in a panic where a pod asks for
hugepages of a size that one of its NUMA nodes does not list. No decision comes of either, so none is predicted here.
"""

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.ids import MEMORY, ResourceName, is_hugepages
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.profile import profile_of


class MemoryManagerWouldNotStart(NoFit):
    """The rules are sound, but not on this machine: the kubelet would not start there."""

    code = "MemoryManagerWouldNotStart"


class HugepagesUnevenlyKnown(NoFit):
    """Hugepages are asked for of a size that some NUMA nodes do not list: the kubelet's memory manager panics over it."""

    code = "HugepagesUnevenlyKnown"

    def __init__(self, resource: ResourceName, without: list[int]) -> None:
        size = clean(resource)
        super().__init__(
            f"{size} is asked for, and NUMA nodes {format_cpuset(without)} do not list this size: the kubelet would "
            "neither admit nor refuse the pod, but end in a panic",
            f"ask without {size}; if those nodes know the size and have none of its pages, give 0 bytes of it there",
        )


def check_memory_manager_starts(topology: Topology, rules: AdmissionRules) -> None:
    """Raises MemoryManagerWouldNotStart. A machine of which no NUMA nodes are known is not judged."""
    if not topology.nodes or rules.memory_manager == "None":
        return
    nodes = {node.id: node for node in topology.nodes}
    for number, amounts in sorted(rules.reserved_memory.items()):
        if not any(amounts.values()):
            continue
        if number not in nodes:
            raise MemoryManagerWouldNotStart(
                f"reserved_memory names NUMA node {number}, which the machine does not have: the kubelet does not start",
                f"reserve memory of NUMA nodes {clean(format_cpuset(nodes))}",
            )
        node = nodes[number]
        there = node.hugepages if node.memory is None else {**node.hugepages, MEMORY: node.memory}
        for resource, size in sorted(amounts.items()):
            if size > there.get(resource, size):
                raise MemoryManagerWouldNotStart(
                    f"reserved_memory keeps {size} bytes of {clean(resource)} of NUMA node {number}, which has "
                    f"{there[resource]}: no kubelet can run so",
                    "reserve less of this node, or the rest of other nodes",
                )


def check_hugepages_known(topology: Topology, demand: PodDemand) -> None:
    """Raises HugepagesUnevenlyKnown; only the kubelet panics, so only its decisions have no answer."""
    if not profile_of(demand.rules.mode).starts_kubelet:
        return
    for container in demand.containers:
        for name in container.memory:
            without = [node.id for node in topology.nodes if name not in node.hugepages]
            if is_hugepages(name) and without:
                raise HugepagesUnevenlyKnown(name, without)
