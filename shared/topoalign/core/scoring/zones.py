"""
Counts the resources of each NUMA node of a machine: capacity, allocatable, available.

CPUs count in millicores, memory and hugepages in bytes, devices as one each. A device counts on each NUMA node with
which it is listed, and on none if none is known. CPUs that no container has exclusively are available.

    2 NUMA nodes with 8 CPUs and 2 GPUs each; CPU 0 is reserved; a container has GPU 1 and CPUs 2-3 of node 0
    node 0: cpu 8000, allocatable 7000, available 5000; nvidia.com/gpu 2, 2 and 1
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
"""Millicores of one CPU."""

Amounts = Mapping[ResourceName, int]


class Zone(NamedTuple):
    """One NUMA node."""

    id: int
    """The kernel's number of the NUMA node."""
    capacity: Amounts
    """All resources of the NUMA node."""
    allocatable: Amounts
    """The part of the capacity that containers can get: without reserved resources and unhealthy devices."""
    available: Amounts
    """The allocatable part that no container has."""
    costs: Mapping[int, int]
    """NUMA node id -> distance (ACPI SLIT, 10 is local); empty: unknown."""


def zones_of(state: NodeState, rules: AdmissionRules) -> tuple[Zone, ...]:
    """
    The NUMA nodes of a node, by id. All have the same device resources, with 0 if a NUMA node has no such device.
    Raises NotEnoughCpus and TooMuchWork if the reserved CPUs cannot be chosen.
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
            # includes memory that is reserved as hugepages
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
"""NUMA node id -> number of devices near it."""


@computed_once
def device_counts(topology: Topology) -> Mapping[ResourceName, Near]:
    """Resource -> number of its devices, healthy or not, by NUMA node. Only resources with a known NUMA node."""
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
    """NUMA node id -> NUMA node id -> distance. Empty: unknown."""
    ids = topology.node_ids
    return {node: dict(zip(ids, row, strict=False)) for node, row in zip(ids, topology.distances or (), strict=False)}
