"""
What is free on a node, counted by sets of NUMA nodes, so that thousands of nodes can be compared with a demand.

A set is known by its number in `subsets(topology.node_ids)`: bit i is the i-th NUMA node of the machine.

    2 NUMA nodes with 3 and 4 free GPUs: (0, 3, 4, 7), for no node, the first, the second, both
"""

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from topoalign.core.admission.preferred_sets import near
from topoalign.core.cpu_assignment.reserved import reserved_cpus
from topoalign.core.hints.cpu import shared_cpus
from topoalign.core.hints.memory import MemoryNode, groups_agree, memory_nodes
from topoalign.core.hints.rules import MOST_LISTED, totals
from topoalign.core.model.errors import NoFit
from topoalign.core.model.hints import Need
from topoalign.core.model.ids import CPU, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.bitmask import Mask, mask_of, several
from topoalign.core.numa_sets.subsets import subsets
from topoalign.core.state.fold import NodeState

NONE = -1
"""Less than the 0 that are free where all are held."""


class Free(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is free on a node. Renewed when the node's facts change, and read for each pod.

    The tables by sets of NUMA nodes are empty for machines with more than MOST_LISTED of these.
    """

    devices: Mapping[ResourceName, int]
    """In all, of each resource that the node has; below 0 where no device of it is healthy."""
    cpus: int
    """In all, for containers that have CPUs to themselves; below 0 where those to keep cannot be chosen."""
    whole_cores: int
    """CPUs that no container has to itself, on cores of which no CPU is kept for the system (full-pcpus-only)."""
    within: Mapping[ResourceName, tuple[int, ...]]
    """Devices, CPUs, and bytes of memory and hugepages: by set of NUMA nodes how much is near one of them."""
    usable: tuple[bool, ...]
    """By set of NUMA nodes: whether a container may use their memory as one group."""
    largest: tuple[int, ...]
    """Some usable sets: each other one is a part of one of them."""


def free_of(state: NodeState, rules: AdmissionRules) -> Free:
    """What is free on a node under the rules of its kubelet."""
    hardware, machine = state.hardware, state.hardware.node_ids
    supplies: dict[ResourceName, Mapping[Mask, int]] = {
        name: near(devices, state.ownership.free(name), machine) for name, devices in hardware.devices.items()
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
    usable, largest = usable_sets(machine, nodes) if nodes and listed else ((), ())
    return Free(
        devices=devices,
        cpus=cpus,
        whole_cores=whole,
        within={name: sums(machine, tuple(sorted(there.items()))) for name, there in supplies.items()}
        if listed
        else {},
        usable=usable,
        largest=largest,
    )


def free_cpus(state: NodeState, rules: AdmissionRules) -> tuple[dict[Mask, int], int]:
    """CPUs that may be given exclusively, by NUMA node; and those of whole cores. Raises NotEnoughCpus, TooMuchWork."""
    cpus, shared, kept = state.hardware.cpu_topology, shared_cpus(state, rules), reserved_cpus(state.hardware, rules)
    free = shared - kept
    there = {1 << node: len(inside & free) for node, inside in cpus.in_node.items()}
    if CpuOption.FULL_PCPUS_ONLY not in rules.cpu_options:
        return there, 0
    broken = frozenset[int]().union(*(cpus.in_core[cpus.core_of[cpu]] for cpu in kept if cpu in cpus.core_of))
    return there, len(shared - broken)


@lru_cache(maxsize=1 << 14)
def sums(machine: tuple[int, ...], supply: tuple[tuple[Mask, int], ...]) -> tuple[int, ...]:
    """By set of NUMA nodes how much is near one of them. Cached: nodes with as much free share the table."""
    space = subsets(machine)
    return tuple(totals(space.nodes, space.masks, Need(0, {mask: amount for mask, amount in supply if mask})))


def usable_sets(machine: tuple[int, ...], nodes: Mapping[int, MemoryNode]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """
    By set of NUMA nodes, whether a container may use their memory as one group; and the largest of these sets.

    Usable are the sets of unused nodes, a node that is used alone, and a group that is used as this very group.
    """
    space = subsets(machine)
    used = mask_of(node for node, each in nodes.items() if each.used)
    kept = {1 << node for node in machine} | {each.group for each in nodes.values() if each.used}
    agreeing = {mask for mask in kept if mask in space.numbers and groups_agree(nodes, mask)}
    usable = tuple(mask in agreeing or (several(mask) and not mask & used) for mask in space.masks)
    largest = agreeing | {space.masks[-1] & ~used}
    return usable, tuple(number for number in sorted(map(space.numbers.__getitem__, largest)) if usable[number])
