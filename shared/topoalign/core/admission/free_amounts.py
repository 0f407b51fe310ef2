"""
Counts the free resources of a node by sets of NUMA nodes, so that thousands of nodes can be compared with a demand.

A set is identified by its number in `subsets(topology.node_ids)`: bit i is the i-th NUMA node of the machine.

    2 NUMA nodes with 3 and 4 free GPUs: (0, 3, 4, 7), for no node, the first, the second, both
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import gt

import msgspec

from topoalign.core.admission.alignment import distances_for
from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.demand.pod_demand import Demand
from topoalign.core.hints.cpu import aligned_by_socket, shared_cpus
from topoalign.core.hints.device_hints import bearing_nodes, count_near
from topoalign.core.hints.hint_rules import MOST_LISTED
from topoalign.core.hints.memory_hints import MemoryNode, groups_agree, memory_node, memory_nodes
from topoalign.core.model.errors import NoFit
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.hints import ResourceNeed, TopologyHint
from topoalign.core.model.ids import CPU, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, narrowness, node_mask, several
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.subsets import Subsets, subsets, totals_by_subset
from topoalign.core.placement.exclusive_cpus import count_on_whole_cores
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.closest_numa import distance_sum
from topoalign.core.state.fold import NodeState

ResourceAmount = tuple[ResourceName, int]

NONE = -1
"""No device is healthy. 0: all healthy devices are held."""


class Free(msgspec.Struct, frozen=True, kw_only=True):
    """
    The free resources of a node. Recomputed when the node's facts change, and read for each pod.

    The tables by sets of NUMA nodes are empty for machines with more than MOST_LISTED NUMA nodes.
    """

    devices: Mapping[ResourceName, int]
    """Resource -> free devices of the whole node; `NONE` if no device of it is healthy."""
    cpus: int
    """CPUs of the whole node that can be allocated exclusively; `NONE` if the reserved CPUs cannot be chosen."""
    whole_cores: int
    """Of these, CPUs on physical cores without a reserved CPU (option full-pcpus-only)."""
    within: Mapping[ResourceName, tuple[int, ...]]
    """Resource -> for each set of NUMA nodes, the free devices, CPUs or bytes that are near one of its nodes."""
    usable: tuple[bool, ...]
    """For each set of NUMA nodes: whether a container can use their memory as one group."""
    reusable: frozenset[int]
    """The sets that are usable even if a container already uses their memory."""
    used: int
    """The set of NUMA nodes whose memory is in use by a container."""


def count_free(state: NodeState, rules: AdmissionRules) -> Free:
    """Counts what is free on a node under the rules of its kubelet."""
    hardware = state.hardware
    machine = state.hardware.node_ids
    supplies: dict[ResourceName, Mapping[Mask, int]] = {
        name: count_by_numa_node(state.ownership.free(name), machine) for name in hardware.devices
    }
    devices = {name: sum(there.values()) if state.healthy(name) else NONE for name, there in supplies.items()}
    cpus = whole = 0
    if rules.cpu_manager == "static":
        try:
            supplies[CPU], whole = free_cpus(state, rules)
            cpus = sum(supplies[CPU].values())
        except NoFit:
            cpus = NONE
    nodes = memory_nodes(state, rules) if rules.memory_manager == "Static" else {}
    for name in {name for node in nodes.values() for name in node.free}:
        supplies[name] = {1 << node: each.free.get(name, 0) for node, each in nodes.items()}
    listed = len(machine) <= MOST_LISTED
    reusable, used = _in_use(machine, nodes) if nodes and listed else (frozenset[int](), 0)
    return Free(
        devices=devices,
        cpus=cpus,
        whole_cores=whole,
        within={name: _sum_by_node_set(machine, tuple(sorted(there.items()))) for name, there in supplies.items()}
        if listed
        else {},
        usable=usable_sets(len(machine), reusable, used) if nodes and listed else (),
        reusable=reusable,
        used=used,
    )


def has_more(now: Free, before: Free) -> bool:
    """Whether more of any resource is free, in total or on a set of NUMA nodes, so that a refused pod might fit."""
    amounts = [(now.cpus, before.cpus), (now.whole_cores, before.whole_cores)]
    amounts += [(amount, before.devices.get(name, NONE)) for name, amount in now.devices.items()]
    tables: list[tuple[Sequence[int], Sequence[int]]] = [(now.usable, before.usable)]
    tables += [(table, before.within.get(name, ())) for name, table in now.within.items()]
    return any(after > had for after, had in amounts) or any(
        len(after) > len(had) or any(map(gt, after, had)) for after, had in tables
    )


def free_cpus(state: NodeState, rules: AdmissionRules) -> tuple[dict[Mask, int], int]:
    """Exclusively allocatable CPUs: by NUMA node, and those on whole cores. Raises NotEnoughCpus and TooMuchWork."""
    cpus = state.hardware.cpu_topology
    shared = shared_cpus(state, rules)
    kept = read_reserved_cpus(state.hardware, rules)
    free = shared - kept
    there = {1 << node: len(inside & free) for node, inside in cpus.in_node.items()}
    if CpuOption.FULL_PCPUS_ONLY not in rules.cpu_options:
        return there, 0
    return there, count_on_whole_cores(cpus, shared, kept)


@lru_cache(maxsize=1 << 12)  # nodes with equal free amounts share the table
def _sum_by_node_set(machine: tuple[int, ...], supply: tuple[tuple[Mask, int], ...]) -> tuple[int, ...]:
    space = subsets(machine)
    return tuple(
        totals_by_subset(space.nodes, space.masks, ResourceNeed(0, {mask: amount for mask, amount in supply if mask}))
    )


def _in_use(machine: tuple[int, ...], nodes: Mapping[int, MemoryNode]) -> tuple[frozenset[int], int]:
    """
    The sets that a container can use even if their memory is in use (single NUMA nodes and existing memory groups), and
    the set of all NUMA nodes whose memory is in use.
    """
    numbers = subsets(machine).numbers
    used = node_mask(node for node, each in nodes.items() if each.used)
    kept = {1 << node for node in machine} | {each.group for each in nodes.values() if each.used}
    agreeing = frozenset(numbers[mask] for mask in kept if mask in numbers and groups_agree(nodes, mask))
    return agreeing, numbers[used]


@lru_cache(maxsize=1 << 12)
def usable_sets(nodes: int, reusable: frozenset[int], used: int) -> tuple[bool, ...]:
    """For each set of NUMA nodes of a machine with `nodes` of them: whether its memory can be used as one group."""
    # unused NUMA nodes, a node that is used by itself, or a set that is used as the same group
    return tuple(number in reusable or (several(number) and not number & used) for number in range(1 << nodes))


# The sets of NUMA nodes to which the kubelet prefers to align a demand.
# In mode `kubelet`, a hint is preferred if it has the fewest NUMA nodes that suffice on the empty machine. Held
# resources do not matter. The merge prefers a set that every hint provider prefers (kubelet v1.36.3,
# topologymanager):
#
#     2 NUMA nodes with 4 GPUs each: 3 GPUs prefer {0} and {1}; 3 GPUs and 70 of 2 x 64 CPUs prefer no set at all


class NodeSets(msgspec.Struct, frozen=True, kw_only=True):
    """Sets of NUMA nodes to which a kubelet can align a demand, and the amounts that it compares."""

    preferred: tuple[int, ...]
    """The sets that are preferred on the empty machine, the most preferred one first."""
    near: tuple[ResourceAmount, ...]
    """The amounts that a set must have of CPUs, and of devices with a known NUMA node."""
    memory: tuple[ResourceAmount, ...]

    def first_with_room(self, free: Free) -> int:
        """The first preferred set with room. The kubelet aligns to it. 0: there is none."""
        return first_with_room(self.preferred, self.near, self.memory, free)


def sets_for(topology: Topology, rules: AdmissionRules, aligned: Demand, *, looks: bool = True) -> NodeSets:
    """The sets and amounts for the demand. `looks`: whether to find the preferred sets."""
    devices = {name: aligned.devices[name] for name in placed_resources(topology, aligned)}
    return NodeSets(
        preferred=preferred_sets(topology, rules, aligned, memory=True) if looks else (),
        near=(*devices.items(), *(((CPU, aligned.cpus),) if aligned.cpus else ())),
        memory=tuple(aligned.memory.items()),
    )


def placed_resources(topology: Topology, demand: Demand) -> list[ResourceName]:
    """The resources of the demand whose devices on this machine have a known NUMA node."""
    known = topology.devices
    return [name for name in demand.devices if name in known and any(known[name].by_nodes)]


def first_with_room(
    sets: tuple[int, ...], near: tuple[ResourceAmount, ...], memory: tuple[ResourceAmount, ...], free: Free
) -> int:
    """The first of these sets of NUMA nodes that has all amounts. 0: there is none."""
    if not sets:
        return 0
    within = free.within
    tables: list[tuple[Sequence[int], int]] = [(within[name], amount) for name, amount in near]
    if memory:
        tables += ((within[name], amount) for name, amount in memory)
        tables.append((free.usable, True))
    for number in sets:
        for table, amount in tables:
            if table[number] < amount:
                break
        else:
            return number
    return 0


def preferred_sets(topology: Topology, rules: AdmissionRules, demand: Demand, *, memory: bool) -> tuple[int, ...]:
    """
    The sets that all hint providers prefer on the empty machine, by their numbers in `subsets(topology.node_ids)`. If
    several have room, the policy chooses the first. If no provider has a hint, the set of all NUMA nodes. `memory`:
    whether to include the hints of the memory manager.
    """
    space = subsets(topology.node_ids)
    found = []
    for name in placed_resources(topology, demand):
        devices = topology.devices[name]
        bearing = node_mask(bearing_nodes(devices.by_nodes, space.nodes))
        supply = count_by_numa_node(devices.everything, space.nodes)
        found.append(_narrowest_sets(space, bearing, [(demand.devices[name], supply)]))
    if demand.cpus:
        found.append(_cpu_sets(space, topology, rules, demand.cpus))
    if memory and demand.memory:
        found.append(_memory_sets(space, topology, rules, demand.memory))
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
            distance_sum(mask, distances) if distances is not None else 0,  # then the closest, if distances count,
            mask,  # then the lowest
        )

    return tuple(space.numbers[mask] for mask in sorted(masks, key=place))


def _cpu_sets(space: Subsets, topology: Topology, rules: AdmissionRules, amount: int) -> frozenset[Mask]:
    cpus = topology.cpu_topology
    narrow = _narrowest_sets(
        space, node_mask(cpus.in_node), [(amount, {1 << node: len(inside) for node, inside in cpus.in_node.items()})]
    )
    if CpuOption.ALIGN_BY_SOCKET not in rules.cpu_options:
        return narrow
    masks = (mask for mask in map(space.masks.__getitem__, space.order) if not mask & ~node_mask(cpus.in_node))
    hints = aligned_by_socket(cpus, [TopologyHint(mask, mask in narrow) for mask in masks], amount)
    return frozenset(hint.affinity for hint in hints if hint.preferred and hint.affinity is not None)


def _memory_sets(
    space: Subsets, topology: Topology, rules: AdmissionRules, amounts: Mapping[ResourceName, int]
) -> frozenset[Mask]:
    there = {
        node.id: memory_node(node, rules.reserved_memory.get(node.id, {}), MemoryUse()).allocatable
        for node in topology.nodes
    }
    needs = [(size, {1 << node: each.get(name, 0) for node, each in there.items()}) for name, size in amounts.items()]
    return _narrowest_sets(space, EVERYWHERE, needs)


def _narrowest_sets(space: Subsets, nodes: Mask, needs: Iterable[tuple[int, dict[Mask, int]]]) -> frozenset[Mask]:
    # the smallest sets of these NUMA nodes that meet all needs; a need is (amount, supply by NUMA node)
    enough = [
        [total >= amount for total in totals_by_subset(space.nodes, space.masks, ResourceNeed(amount, supply))]
        for amount, supply in needs
    ]
    fitting = [
        space.masks[number]
        for number in space.order
        if not space.masks[number] & ~nodes and all(each[number] for each in enough)
    ]
    least = min(map(narrowness, fitting), default=(0, 0))[0]
    return frozenset(mask for mask in fitting if mask.bit_count() == least)


def count_by_numa_node(some: DeviceSet, machine: tuple[int, ...]) -> dict[Mask, int]:
    """NUMA nodes of the machine -> the number of these devices that are near exactly those nodes."""
    by_nodes = some.devices.by_nodes
    return count_near(some, by_nodes, node_mask(bearing_nodes(by_nodes, machine)))
