"""
On which sets of NUMA nodes the kubelet prefers to align a demand: found from the empty machine, once for all machines alike.

In mode `kubelet` a hint is preferred if it has as few NUMA nodes as the empty machine could do with, so what is held on a
node has no say in it. The merge prefers a set that every hint provider prefers (kubelet v1.36.3, topologymanager):

    2 NUMA nodes with 4 GPUs each: 3 GPUs prefer {0} and {1}; 3 GPUs and 70 of 2 x 64 CPUs prefer no set at all
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from topoalign.core.admission.alignment import distances_for
from topoalign.core.demand.pod_demand import Demand
from topoalign.core.hints.cpu import aligned_by_socket
from topoalign.core.hints.devices import bearing_nodes, real_nodes
from topoalign.core.hints.memory import memory_node
from topoalign.core.hints.rules import totals
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.hints import Need, TopologyHint
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, mask_of, narrowness
from topoalign.core.model.topology.device_sets import Devices, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.subsets import Subsets, subsets
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.closeness import spread


def preferred_sets(
    topology: Topology, rules: AdmissionRules, demand: Demand, placed: Iterable[ResourceName], *, memory: bool
) -> tuple[int, ...]:
    """
    The sets that all providers prefer on the empty machine, by their numbers in `subsets(topology.node_ids)`; of several
    with room the policy aligns to the first. All NUMA nodes, if no provider has an opinion.

    `placed`: resources of which a NUMA node is known. `memory`: whether the memory manager has an opinion.
    """
    space = subsets(topology.node_ids)
    found = [device_sets(space, topology.devices[name], demand.devices[name]) for name in placed]
    if demand.cpus:
        found.append(cpu_sets(space, topology, rules, demand.cpus))
    if memory and demand.memory:
        found.append(memory_sets(space, topology, rules, demand.memory))
    if not found:
        return (len(space.masks) - 1,)
    masks = found[0].intersection(*found[1:])
    policy = POLICIES[rules.policy]
    distances = distances_for(topology, rules)
    if policy.single_node:
        masks = frozenset(mask for mask in masks if mask.bit_count() == 1)
        distances = None

    def place(mask: Mask) -> tuple[int, int, int]:
        return (
            mask.bit_count(),  # the fewest nodes,
            spread(mask, distances) if distances is not None else 0,  # then the closest, if distances count,
            mask,  # then the lowest
        )

    return tuple(space.numbers[mask] for mask in sorted(masks, key=place))


def device_sets(space: Subsets, devices: Devices, amount: int) -> frozenset[Mask]:
    """Those that the device manager prefers for so many devices of a resource."""
    return narrowest_sets(
        space, mask_of(bearing_nodes(devices.by_nodes, space.nodes)), [(amount, near(devices.everything, space.nodes))]
    )


def cpu_sets(space: Subsets, topology: Topology, rules: AdmissionRules, amount: int) -> frozenset[Mask]:
    """Those that the CPU manager prefers for so many CPUs."""
    cpus = topology.cpu_topology
    narrow = narrowest_sets(
        space, mask_of(cpus.in_node), [(amount, {1 << node: len(inside) for node, inside in cpus.in_node.items()})]
    )
    if CpuOption.ALIGN_BY_SOCKET not in rules.cpu_options:
        return narrow
    masks = (mask for mask in map(space.masks.__getitem__, space.order) if not mask & ~mask_of(cpus.in_node))
    hints = aligned_by_socket(cpus, [TopologyHint(mask, mask in narrow) for mask in masks], amount)
    return frozenset(hint.affinity for hint in hints if hint.preferred and hint.affinity is not None)


def memory_sets(
    space: Subsets, topology: Topology, rules: AdmissionRules, amounts: Mapping[ResourceName, int]
) -> frozenset[Mask]:
    """Those that the memory manager prefers for so many bytes of each kind."""
    there = {
        node.id: memory_node(node, rules.reserved_memory.get(node.id, {}), MemoryUse()).allocatable
        for node in topology.nodes
    }
    needs = [(size, {1 << node: each.get(name, 0) for node, each in there.items()}) for name, size in amounts.items()]
    return narrowest_sets(space, EVERYWHERE, needs)


def narrowest_sets(space: Subsets, nodes: Mask, needs: Iterable[tuple[int, dict[Mask, int]]]) -> frozenset[Mask]:
    """The sets of these NUMA nodes that meet all needs, as (amount, where there is some), with the fewest nodes."""
    enough = [
        [total >= amount for total in totals(space.nodes, space.masks, Need(amount, supply))]
        for amount, supply in needs
    ]
    fitting = [
        space.masks[number]
        for number in space.order
        if not space.masks[number] & ~nodes and all(each[number] for each in enough)
    ]
    least = min(map(narrowness, fitting), default=(0, 0))[0]
    return frozenset(mask for mask in fitting if mask.bit_count() == least)


def near(some: DeviceSet, machine: tuple[int, ...]) -> dict[Mask, int]:
    """How many of some devices are near which of the machine's NUMA nodes."""
    nodes = mask_of(bearing_nodes(some.devices.by_nodes, machine))
    counted = Counter[Mask]()
    for listed, there in some.devices.by_nodes.items():
        if amount := len(some & there):
            counted[real_nodes(listed or ()) & nodes] += amount
    return counted
