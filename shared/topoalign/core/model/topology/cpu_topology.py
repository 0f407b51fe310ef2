"""
Groups the CPUs of a node by core, cache, socket and NUMA node, for the algorithms that allocate CPUs.

As in the kubelet, NUMA nodes without CPUs are omitted.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from topoalign.core.model.topology.bitmask import Mask, node_mask

if TYPE_CHECKING:
    from topoalign.core.model.topology.model import Cpu


class CpuTopology:
    """
    The CPUs of a machine by group, and the number of groups of each kind. As in the kubelet v1.36.3, averages are
    computed from these numbers. There is one object for each machine, and objects are compared by identity, so results
    that are computed from it can be cached.
    """

    def __init__(self, cpus: Iterable["Cpu"]) -> None:
        known = {cpu.id: cpu for cpu in cpus}
        self.node_of = {cpu.id: cpu.node for cpu in known.values()}
        self.socket_of = {cpu.id: cpu.socket for cpu in known.values()}
        self.core_of = {cpu.id: cpu.core for cpu in known.values()}
        self.uncore_of = {cpu.id: cpu.uncore for cpu in known.values()}
        """CPU -> its last-level cache."""
        self.in_node = invert_groups(self.node_of)
        self.in_socket = invert_groups(self.socket_of)
        self.in_core = invert_groups(self.core_of)
        self.in_uncore = invert_groups(self.uncore_of)
        self.cpus = len(known)
        self.cores = len(self.in_core)
        self.sockets = len(self.in_socket)
        self.nodes = len(self.in_node)
        self.uncores = len(self.in_uncore)

    @cached_property
    def online(self) -> frozenset[int]:
        """Ids of all CPUs that are online."""
        return frozenset(self.node_of)

    @cached_property
    def node_mask_of(self) -> Mapping[int, Mask]:
        """CPU -> the mask of its NUMA node."""
        return {cpu: node_mask((node,)) for cpu, node in self.node_of.items()}

    @cached_property
    def sockets_of_node(self) -> Mapping[int, frozenset[int]]:
        """NUMA node -> the sockets that its CPUs are on."""
        return {node: frozenset(self.socket_of[cpu] for cpu in inside) for node, inside in self.in_node.items()}

    @property
    def cpus_per_core(self) -> int:
        """The average number of CPUs of a core, rounded down; 0 without CPUs. Offline siblings reduce it."""
        return self.cpus // self.cores if self.cores else 0

    @property
    def cpus_per_socket(self) -> int:
        """The average number of CPUs of a socket, rounded down; 0 without CPUs."""
        return self.cpus // self.sockets if self.sockets else 0

    @property
    def cpus_per_uncore(self) -> int:
        """The average number of CPUs of a last-level cache, rounded down; 0 without CPUs."""
        return self.cpus // self.uncores if self.uncores else 0

    @cached_property
    def is_even(self) -> bool:
        """Whether all cores have the same number of CPUs, and all sockets, too. If so, the averages are exact."""
        return all(len({*map(len, units.values())}) <= 1 for units in (self.in_core, self.in_socket))

    @property
    def numa_first(self) -> bool:
        """Whether a NUMA node contains whole sockets; otherwise, a socket contains whole NUMA nodes."""
        return self.sockets >= self.nodes


def invert_groups(group_of: Mapping[int, int]) -> dict[int, frozenset[int]]:
    """Inverts the mapping CPU -> group to group -> its CPUs, in ascending order of groups."""
    members: dict[int, set[int]] = {}
    for cpu, group in group_of.items():
        members.setdefault(group, set()).add(cpu)
    return {group: frozenset(members[group]) for group in sorted(members)}
