"""
Takes CPUs so that few cores and sockets are split: packed, or spread over cores (kubelet v1.36.3, CPU manager, static).

The rule: first whole NUMA nodes and sockets, as long as they fit in the number of needed CPUs. With `prefer_uncore`,
next whole last-level caches, then the remaining CPUs from a single cache. Then whole cores, then single CPUs. Of equal
units, the one with the fewest free CPUs comes first, so that partly used units are used up, then the one with the
lowest id. Spread omits the step of whole cores, and takes single CPUs by ascending id.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import repeat

from topoalign.core.model.errors import NoFit
from topoalign.core.model.topology.cpu_topology import CpuTopology


class NotEnoughCpus(NoFit):
    """Raised when fewer CPUs can be allocated exclusively than are requested."""

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"not enough CPUs: {requested} requested, {available} can be given exclusively",
            "ask for fewer CPUs, or wait until a container with CPUs of its own has ended",
        )


def take_packed(
    cpus: CpuTopology,
    available: Set[int],
    count: int,
    *,
    spread: bool = False,
    prefer_uncore: bool = False,
    by_averages: bool = True,
) -> frozenset[int]:
    """
    Takes `count` of the available CPUs so that few units are split. Raises NotEnoughCpus.

    With `by_averages`, a core or socket counts as free if the number of its free CPUs equals the average number of CPUs
    of a core or socket. This is the kubelet's test: if sockets or cores differ, it can allocate a whole one of which
    some CPUs are in use. Without `by_averages`, a core or socket is free if all its CPUs are free.
    """
    if count > len(available):
        raise NotEnoughCpus(count, len(available))
    taking = Taking(cpus, available, count, by_averages)
    steps = [taking.whole_nodes, taking.whole_sockets]
    if not cpus.numa_first:  # a socket contains several NUMA nodes
        steps.reverse()
    if prefer_uncore:
        steps += [taking.whole_caches_and_part_of_one]
    steps += [taking.single_cpus_by_id] if spread else [taking.whole_cores, taking.single_cpus]
    for step in steps:
        if taking.needed <= 0:
            break
        step()
    return frozenset(taking.taken)


class Taking:
    """One take in progress. Each step sorts the units once at its start, not again after each unit that it takes."""

    def __init__(self, cpus: CpuTopology, available: Set[int], count: int, by_averages: bool = True) -> None:
        self.cpus = cpus
        self.free = set(available)
        self.taken: set[int] = set()
        self.needed = count
        self.by_averages = by_averages

    def whole_nodes(self) -> None:
        """Takes free NUMA nodes that fit in the number of needed CPUs."""
        inside = self.cpus.in_node
        if self._may_fit(inside):
            self._take_units(inside[node] for node in self.nodes() if inside[node] <= self.free)

    def whole_sockets(self) -> None:
        """Takes free sockets that fit in the number of needed CPUs."""
        if not self._may_fit(self.cpus.in_socket):
            return
        inside = [self.cpus.in_socket[socket] for socket in self._sockets()]
        self._take_units([socket for socket in inside if self._is_free(socket, self.cpus.cpus_per_socket)])

    def whole_cores(self) -> None:
        """Takes free cores that fit in the number of needed CPUs."""
        inside = (self.cpus.in_core[core] for core in self._cores())
        self._take_units(core for core in inside if self._is_free(core, self.cpus.cpus_per_core))

    def _may_fit(self, units: Mapping[int, frozenset[int]]) -> bool:
        # whether the units have to be sorted at all
        return any(len(unit) <= self.needed for unit in units.values())

    def _is_free(self, unit: frozenset[int], average: int) -> bool:
        return len(unit & self.free) == average if self.by_averages else unit <= self.free

    def whole_caches_and_part_of_one(self) -> None:
        """Takes free last-level caches that fit, then the remaining CPUs from a single cache that has enough."""
        caches = self._caches()
        inside = self.cpus.in_uncore
        if self.needed >= self.cpus.cpus_per_uncore:
            self._take_units(inside[cache] for cache in caches if inside[cache] <= self.free)
        for cache in caches:
            if self.needed > 0:
                self._part_of(inside[cache])

    def _part_of(self, cache: frozenset[int]) -> None:
        """
        Takes all needed CPUs from one cache, from the cores with the lowest ids. Takes none if these cores do not have
        exactly the needed number.
        """
        threads = self.cpus.cpus_per_core
        cores = sorted({self.cpus.core_of[cpu] for cpu in cache & self.free})[: -(-self.needed // threads)]
        chosen = sorted(cpu for core in cores for cpu in self.cpus.in_core[core] & self.free)
        if self.needed % 2 and threads > 1 and len(chosen) > self.needed:
            chosen.pop()
        if len(chosen) == self.needed:
            self._take(chosen)

    def single_cpus(self) -> None:
        """Takes the needed CPUs core by core, in the order of `_cores`."""
        ordered = [cpu for core in self._cores() for cpu in sorted(self.cpus.in_core[core] & self.free)]
        self._take(ordered[: self.needed])

    def single_cpus_by_id(self) -> None:
        """Takes the needed CPUs socket by socket, by ascending CPU id."""
        ordered = [cpu for socket in self._sockets() for cpu in sorted(self.cpus.in_socket[socket] & self.free)]
        self._take(ordered[: self.needed])

    def _take_units(self, units: Iterable[frozenset[int]]) -> None:
        """Takes each unit that fits in the number of needed CPUs, in this order. The units have no CPU in common."""
        for unit in units:
            if len(unit) <= self.needed:
                self._take(unit)
            if not self.needed:
                return

    def _take(self, cpus: Iterable[int]) -> None:
        chosen = frozenset(cpus)
        self.taken |= chosen
        self.free -= chosen
        self.needed -= len(chosen)

    # Units with free CPUs, in the order in which they are used.

    def nodes(self) -> list[int]:
        """NUMA nodes with free CPUs, in the order in which they are used."""
        if self.cpus.numa_first:
            return self._ordered(self.cpus.node_of)
        return self._ordered(self.cpus.node_of, within=self.cpus.socket_of, outer=self._sockets())

    def _sockets(self) -> list[int]:
        if not self.cpus.numa_first:
            return self._ordered(self.cpus.socket_of)
        return self._ordered(self.cpus.socket_of, within=self.cpus.node_of, outer=self.nodes())

    def _caches(self) -> list[int]:
        """In the order of their NUMA nodes, regardless of whether nodes or sockets are larger."""
        return self._ordered(self.cpus.uncore_of, within=self.cpus.node_of, outer=self.nodes())

    def _cores(self) -> list[int]:
        if self.cpus.numa_first:
            return self._ordered(self.cpus.core_of, within=self.cpus.socket_of, outer=self._sockets())
        return self._ordered(self.cpus.core_of, within=self.cpus.node_of, outer=self.nodes())

    def _ordered(
        self, unit_of: Mapping[int, int], within: Mapping[int, int] | None = None, outer: Iterable[int] = ()
    ) -> list[int]:
        """Units with free CPUs, in the order of their outer units, then of the number of free CPUs, then of the ids."""
        units = [unit_of[cpu] for cpu in self.free]
        free = Counter(units)
        rank = {unit: position for position, unit in enumerate(outer)}
        ranks = repeat(0) if within is None else [rank[within[cpu]] for cpu in self.free]
        places = set(zip(ranks, units, strict=False))
        ordered = sorted(places, key=lambda place: (place[0], free[place[1]], place[1]))
        return list(dict.fromkeys(unit for _, unit in ordered))
