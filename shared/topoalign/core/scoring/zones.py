"""
Counts what each NUMA node of a machine has: in all, for containers, and left.

CPUs count in millicores, memory and hugepages in bytes, devices as one each. A device that is listed with several NUMA nodes
counts on each of them, and one of which no NUMA node is known on none. CPUs are left that no container has to itself.

    2 NUMA nodes with 8 CPUs and 2 GPUs each; CPU 0 is kept for the system, a container has GPU 1 and CPUs 2-3 of node 0
    node 0: cpu 8000, for containers 7000, left 5000; nvidia.com/gpu 2, 2 and 1
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.hints.cpu import available_cpus
from topoalign.core.hints.memory_hints import memory_nodes
from topoalign.core.model.ids import CPU, MEMORY, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

MILLICORES = 1000
"""Of one CPU."""

Amounts = Mapping[ResourceName, int]


class Zone(NamedTuple):
    """One NUMA node."""

    id: int
    """The kernel's number of it."""
    capacity: Amounts
    """All that it has."""
    allocatable: Amounts
    """What of that containers may have: without what is kept for the system, and without unhealthy devices."""
    available: Amounts
    """What of that no container has."""
    costs: Mapping[int, int]
    """NUMA node id -> distance (ACPI SLIT, 10 is local); empty: not known."""


def zones_of(state: NodeState, rules: AdmissionRules) -> tuple[Zone, ...]:
    """
    The NUMA nodes of a node, by id; each names the same devices, so that "none left" differs from "no such device". Raises
    NotEnoughCpus and TooMuchWork where the CPUs that the system keeps cannot be chosen.
    """
    hardware = state.hardware
    memory = memory_nodes(state, rules)
    online = hardware.cpu_topology.online
    kept = read_reserved_cpus(hardware, rules)
    everything = device_counts(hardware)
    usable = {name: _count_near_nodes(state.healthy(name)) for name in everything}
    free = {name: _count_near_nodes(state.ownership.free(name)) for name in everything}
    cpus = [_by_node(hardware, each) for each in (online, online - kept, available_cpus(state, rules))]

    def amounts(node: int, cpus: Mapping[int, int], memory: Amounts, devices: Mapping[ResourceName, Near]) -> Amounts:
        return {CPU: cpus.get(node, 0) * MILLICORES, **memory, **{name: at[node] for name, at in devices.items()}}

    costs = _numa_distances(hardware)
    return tuple(
        Zone(
            node.id,
            # memory that is set aside as hugepages included
            amounts(
                node.id,
                cpus[0],
                node.hugepages if node.memory is None else {MEMORY: node.memory, **node.hugepages},
                everything,
            ),
            amounts(node.id, cpus[1], memory[node.id].allocatable, usable),
            amounts(node.id, cpus[2], memory[node.id].free, free),
            costs.get(node.id, {}),
        )
        for node in hardware.nodes
    )


Near = Counter[int]
"""NUMA node id -> how many devices are near it."""


@computed_once
def device_counts(topology: Topology) -> Mapping[ResourceName, Near]:
    """Resource of which a device has a known NUMA node -> how many there are, healthy or not."""
    counts = {name: _count_near_nodes(devices.everything) for name, devices in topology.devices.items()}
    return {name: count for name, count in counts.items() if count}


def _count_near_nodes(some: DeviceSet) -> Near:
    counted = Near()
    for nodes, there in some.devices.by_nodes.items():
        if amount := len(some & there):
            for node in nodes or ():
                counted[node] += amount
    return counted


def _by_node(topology: Topology, cpus: Iterable[int]) -> Counter[int]:
    node_of = topology.cpu_topology.node_of
    return Counter(node_of[cpu] for cpu in cpus if cpu in node_of)


@computed_once
def _numa_distances(topology: Topology) -> Mapping[int, Mapping[int, int]]:
    """NUMA node id -> NUMA node id -> distance; empty where they are not known."""
    ids = topology.node_ids
    return {node: dict(zip(ids, row, strict=False)) for node, row in zip(ids, topology.distances or (), strict=False)}
