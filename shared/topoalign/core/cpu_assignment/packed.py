"""
Takes CPUs so that few cores and sockets are split: packed, or spread over the cores (kubelet v1.36.3, CPU manager,
static).

The rule: whole NUMA nodes and sockets as long as they fit in what is still needed; on wish, whole last-level caches and then
the rest from a single one; then whole cores, then single CPUs. Of equals the one with the fewest free CPUs comes first, so
that what is broken already is used up, then the lowest id. Spread does without the step of whole cores and takes single CPUs
by ascending id.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import repeat

from topoalign.core.model.errors import NoFit
from topoalign.core.model.topology.cpu_topology import CpuTopology


class NotEnoughCpus(NoFit):
    """Raised when fewer CPUs can be given exclusively than are asked for."""

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
    Takes `count` of the available CPUs so that little is broken. Raises NotEnoughCpus.

    With `by_averages` a core or socket counts as free when it has as many free CPUs as the average one has in all. That is
    the kubelet's test: where sockets or cores differ, it gives away a whole one of which CPUs are in use. Without, it is
    free when all its CPUs are.
    """
    if count > len(available):
        raise NotEnoughCpus(count, len(available))
    taking = Taking(cpus, available, count, by_averages)
    steps = [taking.whole_nodes, taking.whole_sockets]
    if not cpus.numa_first:  # a socket holds several NUMA nodes
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
    """One take in progress. Each step orders the units once at its start, and not again after each unit it takes."""

    def __init__(self, cpus: CpuTopology, available: Set[int], count: int, by_averages: bool = True) -> None:
        self.cpus = cpus
        self.free = set(available)
        self.taken: set[int] = set()
        self.needed = count
        self.by_averages = by_averages

    def whole_nodes(self) -> None:
        """Takes the free NUMA nodes that fit in what is still needed."""
        inside = self.cpus.in_node
        if self._may_fit(inside):
            self._take_units(inside[node] for node in self.nodes() if inside[node] <= self.free)

    def whole_sockets(self) -> None:
        """Takes the free sockets that fit in what is still needed."""
        if not self._may_fit(self.cpus.in_socket):
            return
        inside = [self.cpus.in_socket[socket] for socket in self._sockets()]
        self._take_units([socket for socket in inside if self._is_free(socket, self.cpus.cpus_per_socket)])

    def whole_cores(self) -> None:
        """Takes the free cores that fit in what is still needed."""
        inside = (self.cpus.in_core[core] for core in self._cores())
        self._take_units(core for core in inside if self._is_free(core, self.cpus.cpus_per_core))

    def _may_fit(self, units: Mapping[int, frozenset[int]]) -> bool:
        # whether the units have to be ordered
        return any(len(unit) <= self.needed for unit in units.values())

    def _is_free(self, unit: frozenset[int], average: int) -> bool:
        return len(unit & self.free) == average if self.by_averages else unit <= self.free

    def whole_caches_and_part_of_one(self) -> None:
        """Takes free last-level caches that fit, then the rest from a single cache that has enough."""
        caches = self._caches()
        inside = self.cpus.in_uncore
        if self.needed >= self.cpus.cpus_per_uncore:
            self._take_units(inside[cache] for cache in caches if inside[cache] <= self.free)
        for cache in caches:
            if self.needed > 0:
                self._part_of(inside[cache])

    def _part_of(self, cache: frozenset[int]) -> None:
        """Takes all that is still needed from one cache, cores of lowest id first; nothing if it does not divide so."""
        threads = self.cpus.cpus_per_core
        cores = sorted({self.cpus.core_of[cpu] for cpu in cache & self.free})[: -(-self.needed // threads)]
        chosen = sorted(cpu for core in cores for cpu in self.cpus.in_core[core] & self.free)
        if self.needed % 2 and threads > 1 and len(chosen) > self.needed:
            chosen.pop()
        if len(chosen) == self.needed:
            self._take(chosen)

    def single_cpus(self) -> None:
        """Takes what is still needed core by core, in the order of `_cores`."""
        ordered = [cpu for core in self._cores() for cpu in sorted(self.cpus.in_core[core] & self.free)]
        self._take(ordered[: self.needed])

    def single_cpus_by_id(self) -> None:
        """Takes what is still needed socket by socket, by ascending CPU id."""
        ordered = [cpu for socket in self._sockets() for cpu in sorted(self.cpus.in_socket[socket] & self.free)]
        self._take(ordered[: self.needed])

    def _take_units(self, units: Iterable[frozenset[int]]) -> None:
        """Takes each of these units, which have no CPU in common, that fits in what is still needed, in their order."""
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
        """Node by node, whichever of node and socket is the larger."""
        return self._ordered(self.cpus.uncore_of, within=self.cpus.node_of, outer=self.nodes())

    def _cores(self) -> list[int]:
        if self.cpus.numa_first:
            return self._ordered(self.cpus.core_of, within=self.cpus.socket_of, outer=self._sockets())
        return self._ordered(self.cpus.core_of, within=self.cpus.node_of, outer=self.nodes())

    def _ordered(
        self, unit_of: Mapping[int, int], within: Mapping[int, int] | None = None, outer: Iterable[int] = ()
    ) -> list[int]:
        """Those of the first outer unit first, then by number of free CPUs, then by id."""
        units = [unit_of[cpu] for cpu in self.free]
        free = Counter(units)
        rank = {unit: position for position, unit in enumerate(outer)}
        ranks = repeat(0) if within is None else [rank[within[cpu]] for cpu in self.free]
        places = set(zip(ranks, units, strict=False))
        ordered = sorted(places, key=lambda place: (place[0], free[place[1]], place[1]))
        return list(dict.fromkeys(unit for _, unit in ordered))
