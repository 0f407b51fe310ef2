"""
Which CPUs a container gets to itself, once its NUMA affinity is known (kubelet v1.36.3, CPU manager, static, packed).

The rule: whole NUMA nodes and sockets as long as they fit in what is still needed, then whole cores, then single CPUs; of
equals the one with the fewest free CPUs, so that what is broken already is used up first, then the lowest id.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from topoalign.core.errors import NoFit
from topoalign.core.topology.bitmask import Mask
from topoalign.core.topology.cpus import CpuTopology


class NotEnoughCpus(NoFit):
    """Fewer CPUs can be given exclusively than are asked for."""

    code = "NotEnoughCpus"

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"not enough CPUs: {requested} requested, {available} can be given exclusively",
            "ask for fewer CPUs, or wait until a container with CPUs of its own has ended",
        )


def choose_cpus(cpus: CpuTopology, allocatable: Set[int], count: int, affinity: Mask | None) -> frozenset[int]:
    """
    `count` of the allocatable CPUs, those of the affinity first; None stands for any node.

    Raises NotEnoughCpus.
    """
    if count > len(allocatable):
        raise NotEnoughCpus(count, len(allocatable))
    if affinity is None:
        return take(cpus, allocatable, count)
    aligned = {cpu for cpu in allocatable if affinity >> cpus.node_of[cpu] & 1}
    inside = take(cpus, aligned, min(count, len(aligned)))
    return inside | take(cpus, allocatable - inside, count - len(inside))


def take(cpus: CpuTopology, available: Set[int], count: int) -> frozenset[int]:
    """`count` of the available CPUs, packed. Raises NotEnoughCpus."""
    if count > len(available):
        raise NotEnoughCpus(count, len(available))
    taking = Taking(cpus, available, count)
    for step in (taking.whole_outer_units, taking.whole_inner_units, taking.whole_cores, taking.single_cpus):
        if taking.needed <= 0:
            break
        step()
    return frozenset(taking.taken)


class Taking:
    """One take under way. Each step orders the units once at its start, and not again after each unit it takes."""

    def __init__(self, cpus: CpuTopology, available: Set[int], count: int) -> None:
        self.cpus = cpus
        self.free = set(available)
        self.taken: set[int] = set()
        self.needed = count

    def whole_outer_units(self) -> None:
        self.whole_nodes() if self.cpus.numa_first else self.whole_sockets()

    def whole_inner_units(self) -> None:
        self.whole_sockets() if self.cpus.numa_first else self.whole_nodes()

    def whole_nodes(self) -> None:
        inside = self.cpus.in_node
        self.take_units(inside[node] for node in self.nodes() if inside[node] <= self.free)

    def whole_sockets(self) -> None:
        free = self.free_by(self.cpus.socket_of)
        whole = [socket for socket in self.sockets() if free[socket] == self.cpus.cpus_per_socket]
        self.take_units(self.cpus.in_socket[socket] for socket in whole)

    def whole_cores(self) -> None:
        free = self.free_by(self.cpus.core_of)
        whole = [core for core in self.cores() if free[core] == self.cpus.cpus_per_core]
        self.take_units(self.cpus.in_core[core] for core in whole)

    def single_cpus(self) -> None:
        ordered = [cpu for core in self.cores() for cpu in sorted(self.cpus.in_core[core] & self.free)]
        self.take(ordered[: self.needed])

    def take_units(self, units: Iterable[frozenset[int]]) -> None:
        for unit in units:
            if len(unit) <= self.needed:
                self.take(unit)

    def take(self, cpus: Iterable[int]) -> None:
        chosen = frozenset(cpus)
        self.taken |= chosen
        self.free -= chosen
        self.needed -= len(chosen)

    def nodes(self) -> list[int]:
        """NUMA nodes with free CPUs, in the order in which they are used."""
        if self.cpus.numa_first:
            return self.ordered(self.cpus.node_of)
        return self.ordered(self.cpus.node_of, within=self.cpus.socket_of, outer=self.sockets())

    def sockets(self) -> list[int]:
        if not self.cpus.numa_first:
            return self.ordered(self.cpus.socket_of)
        return self.ordered(self.cpus.socket_of, within=self.cpus.node_of, outer=self.nodes())

    def cores(self) -> list[int]:
        """Cores with free CPUs: unit by unit of the level above them."""
        if self.cpus.numa_first:
            return self.ordered(self.cpus.core_of, within=self.cpus.socket_of, outer=self.sockets())
        return self.ordered(self.cpus.core_of, within=self.cpus.node_of, outer=self.nodes())

    def free_by(self, unit_of: Mapping[int, int]) -> Counter[int]:
        return Counter(unit_of[cpu] for cpu in self.free)

    def ordered(
        self, unit_of: Mapping[int, int], within: Mapping[int, int] | None = None, outer: Iterable[int] = ()
    ) -> list[int]:
        """The units with free CPUs, those of the first outer unit first, then by free CPUs, then by id."""
        free = self.free_by(unit_of)
        rank = {unit: position for position, unit in enumerate(outer)}
        places = {(rank[within[cpu]] if within is not None else 0, unit_of[cpu]) for cpu in self.free}
        ordered = sorted(places, key=lambda place: (place[0], free[place[1]], place[1]))
        return list(dict.fromkeys(unit for _, unit in ordered))
