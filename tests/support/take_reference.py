"""
What the CPU manager does with CPUs, written naively from the rules of the kubelet v1.36.3: no bit masks, no short cuts.

Everything is recomputed wherever it is needed, all combinations are listed, and the standard deviation is taken of floating
point numbers, as the kubelet takes it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from math import ceil, floor, sqrt

from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.model import Cpu


@dataclass(frozen=True)
class Rig:
    """A machine: its CPUs as rows."""

    rows: tuple[Cpu, ...]

    @property
    def topology(self) -> CpuTopology:
        return CpuTopology(self.rows)

    def units(self, kind: str, rows: Iterable[Cpu] | None = None) -> list[int]:
        return sorted({getattr(row, kind) for row in (self.rows if rows is None else rows)})

    def of(self, kind: str, unit: int) -> set[int]:
        return {row.id for row in self.rows if getattr(row, kind) == unit}

    def numa_first(self) -> bool:
        return len(self.units("socket")) >= len(self.units("node"))

    def average(self, kind: str) -> int:
        return len(self.rows) // len(self.units(kind))

    def inside(self, free: set[int], kind: str, outer: str | None = None, unit: int = 0) -> list[int]:
        """The units with free CPUs, within one outer unit: by free CPUs, then by id."""
        rows = [row for row in self.rows if row.id in free and (outer is None or getattr(row, outer) == unit)]
        return sorted(self.units(kind, rows), key=lambda each: (len(self.of(kind, each) & free), each))

    def order(self, free: set[int], kind: str) -> list[int]:
        above = {
            True: {"node": None, "socket": "node", "core": "socket", "uncore": "node"},
            False: {"socket": None, "node": "socket", "core": "node", "uncore": "node"},
        }[self.numa_first()][kind]
        if above is None:
            return self.inside(free, kind)
        listed = [unit for outer in self.order(free, above) for unit in self.inside(free, kind, above, outer)]
        return list(dict.fromkeys(listed))


def reference_packed(
    rig: Rig, available: set[int], count: int, spread: bool = False, uncore: bool = False
) -> set[int] | None:
    """None: there are not enough."""
    if count > len(available):
        return None
    free, taken, needed = set(available), set[int](), count

    def take(cpus: set[int]) -> None:
        nonlocal free, taken, needed
        free, taken, needed = free - cpus, taken | cpus, needed - len(cpus)

    def take_whole(kind: str, is_whole: Callable[[set[int]], bool]) -> None:
        whole = [rig.of(kind, unit) for unit in rig.order(free, kind) if is_whole(rig.of(kind, unit))]
        for cpus in whole:
            if len(cpus) <= needed:
                take(cpus)

    for kind in ("node", "socket") if rig.numa_first() else ("socket", "node"):
        if kind == "node":
            take_whole("node", lambda cpus: cpus <= free)
        else:
            take_whole("socket", lambda cpus: len(cpus & free) == rig.average("socket"))
    if uncore and needed > 0:
        for cache in rig.order(free, "uncore"):
            if needed >= rig.average("uncore"):
                take_whole("uncore", lambda cpus: cpus <= free)
            if needed <= 0:
                break
            threads = rig.average("core")
            cores = rig.units("core", [row for row in rig.rows if row.uncore == cache and row.id in free])
            chosen = sorted(
                cpu for core in cores[: ceil(needed / threads)] for cpu in rig.of("core", core) if cpu in free
            )
            if needed % 2 == 1 and threads > 1 and len(chosen) > needed:
                chosen = chosen[:-1]
            if len(chosen) == needed:
                take(set(chosen))
                break
    if not spread:
        take_whole("core", lambda cpus: len(cpus & free) == rig.average("core"))
    kind = "socket" if spread else "core"
    for cpu in [cpu for unit in rig.order(free, kind) for cpu in sorted(rig.of(kind, unit) & free)]:
        if needed > 0:
            take({cpu})
    return taken


def deviation(amounts: list[int]) -> float:
    def rounded(number: float) -> float:
        return floor(number * 1000 + 0.5) / 1000

    mean = rounded(sum(amounts) / len(amounts))
    return rounded(sqrt(sum((amount - mean) ** 2 for amount in amounts) / len(amounts)))


def reference_distributed(rig: Rig, available: set[int], count: int, group: int) -> set[int] | None:
    if count > len(available) or count <= 0 or count % group:
        return reference_packed(rig, available, count)
    nodes = rig.order(set(available), "node")
    amount = {node: len(rig.of("node", node) & available) for node in nodes}
    per_node = ceil(ceil(len(rig.rows) / group) / len(rig.units("node")))
    for size in range(ceil(count // group / per_node), min(count // group, len(nodes)) + 1):
        each = count // size // group * group
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
        for combination in combinations(nodes, size):
            if sum(amount[node] // group * group for node in combination) < count:
                continue
            if any(amount[node] < each for node in combination):
                continue
            left = {node: amount[node] - (each if node in combination else 0) for node in nodes}
            outcomes: list[tuple[float, tuple[int, ...]]] = []
            if count == each * size:
                outcomes = [(deviation(list(left.values())), ())]
            else:
                able = [node for node in combination if left[node] >= group]
                for few in range(len(able), 0, -1):
                    for subset in combinations(able, few):
                        rest, after = count - each * size, dict(left)
                        if sum(after[node] // group * group for node in subset) < rest:
                            continue
                        while rest > 0:
                            for node in subset:
                                if rest > 0 and after[node] >= group:
                                    after[node], rest = after[node] - group, rest - group
                        outcomes.append((deviation(list(after.values())), subset))
            for score, subset in outcomes:
                if best is None or score < best[0]:
                    best = (score, combination, subset)
        if best is not None:
            return handed_out(rig, available, count, group, best[1], best[2])
    return reference_packed(rig, available, count)


def handed_out(
    rig: Rig, available: set[int], count: int, group: int, nodes: tuple[int, ...], extra: tuple[int, ...]
) -> set[int]:
    each, taken = count // len(nodes) // group * group, set[int]()
    for node in nodes:
        taken |= reference_packed(rig, rig.of("node", node) & available - taken, each) or set()
    rest = count - each * len(nodes)
    while rest > 0:
        for node in extra:
            free = rig.of("node", node) & available - taken
            if rest > 0 and len(free) >= group:
                taken |= reference_packed(rig, free, group) or set()
                rest -= group
    return taken


def reference_hints(
    rig: Rig, available: set[int], reusable: set[int], request: int, by_socket: bool
) -> list[tuple[tuple[int, ...], bool]]:
    """(NUMA nodes, preferred) in the kubelet's order."""
    nodes = rig.units("node")
    least, found = len(nodes), []
    for size in range(1, len(nodes) + 1):
        for mask in combinations(nodes, size):
            inside = {row.id for row in rig.rows if row.node in mask}
            if len(inside) >= request and size < least:
                least = size
            if reusable <= inside and len(available & inside) + len(reusable & inside) >= request:
                found.append(mask)
    per_socket = len(nodes) // len(rig.units("socket"))

    def whole_sockets(mask: tuple[int, ...]) -> bool:
        touched = {row.socket for row in rig.rows if row.node in mask}
        return by_socket and per_socket > 0 and len(touched) == ceil(least / per_socket)

    return [(mask, len(mask) == least or whole_sockets(mask)) for mask in found]
