"""Takes and CPU hints are the kubelet's on any machine: compared with a naive reading of its rules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from itertools import count as counter
from math import ceil, floor, sqrt
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.cpu_assignment.distributed import MOST_STEPS, best_split, choices, take_distributed, unevenness
from topoalign.core.cpu_assignment.packed import take_packed
from topoalign.core.hints.cpu import cpu_hints
from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import nodes_of
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


def rig(sockets: int, nodes: int, caches: int, cores: int, threads: int, joined: bool, apart: bool) -> Rig:
    """
    `nodes` NUMA nodes per socket with `caches` caches of `cores` cores; `joined`: a NUMA node holds two sockets instead.

    `apart`: the siblings of a core are numbered far apart, as on Intel machines; else they are neighbours.
    """
    places = [
        (socket, socket // 2 if joined else socket * nodes + node, cache)
        for socket in range(sockets)
        for node in range(1 if joined else nodes)
        for cache in range(caches)
        for _ in range(cores)
    ]
    caches_seen: dict[tuple[int, int, int], int] = {}
    fresh = counter()
    rows = []
    for core, place in enumerate(places):
        first = core if apart else core * threads
        uncore = caches_seen[place] if place in caches_seen else caches_seen.setdefault(place, next(fresh))
        for thread in range(threads):
            cpu = core + thread * len(places) if apart else first + thread
            rows.append(Cpu(id=cpu, core=first, socket=place[0], node=place[1], uncore=uncore))
    return Rig(tuple(sorted(rows, key=lambda row: row.id)))


class Situation(NamedTuple):
    """A machine, the CPUs of it that are free, and how many are asked for."""

    rig: Rig
    free: set[int]
    asked: int


def situation(seed: int) -> Situation:
    """
    Machines of all shapes, with one, two or four threads per core; of half of them CPUs are offline, so that cores, caches,
    nodes and sockets differ in size.
    """
    chance = Random(seed)
    sockets = chance.randint(1, 4)
    threads = chance.choice([1, 2, 1, 2, 4])
    cores = chance.randint(1, 4 if threads < 4 else 2)
    sizes = (chance.randint(1, 6 // sockets), chance.randint(1, 2), cores, threads)
    whole = rig(sockets, *sizes, joined=chance.random() < 0.25, apart=chance.random() < 0.5)
    rows = list(whole.rows)
    for kind in chance.choice([(), (), ("node",), ("node", "core", "uncore", "socket")]):
        online = {unit: chance.choice([1, 1, 0.7, 0.4]) for unit in whole.units(kind)}
        rows = [row for row in rows if chance.random() < online[getattr(row, kind)]] or rows
    of = Rig(tuple(rows))
    idle = {node: chance.choice([1, 1, 0.8, 0.5, 0.2, 0]) for node in of.units("node")}
    free = {row.id for row in of.rows if chance.random() < idle[row.node]}
    return Situation(of, free, chance.randint(0, len(free)))


SITUATIONS = st.integers(0, 1 << 32).map(situation)


@given(SITUATIONS, st.booleans(), st.booleans())
def test_packed_and_spread_takes_equal_the_reference(of: Situation, spread: bool, uncore: bool) -> None:
    taken = take_packed(of.rig.topology, of.free, of.asked, spread=spread, prefer_uncore=uncore)

    assert reference_packed(of.rig, of.free, of.asked, spread, uncore) == {*taken}


@given(SITUATIONS, st.integers(1, 3))
def test_distributed_takes_equal_the_reference(of: Situation, group: int) -> None:
    """Fragments of groups that are left over, and combinations of four and more NUMA nodes, included."""
    taken = take_distributed(of.rig.topology, of.free, of.asked, group)

    assert reference_distributed(of.rig, of.free, of.asked, group) == {*taken}


@given(SITUATIONS, st.booleans(), st.booleans(), st.integers(1, 2))
def test_in_mode_best_exactly_the_asked_number_of_free_cpus_is_taken(
    of: Situation, spread: bool, uncore: bool, group: int
) -> None:
    """In mode `best` only free CPUs are taken, and exactly as many as asked for, also on machines with offline CPUs."""
    for taken in (
        take_packed(of.rig.topology, of.free, of.asked, spread=spread, prefer_uncore=uncore, by_averages=False),
        take_distributed(of.rig.topology, of.free, of.asked, group, by_averages=False),
    ):
        assert of.asked == len(taken)
        assert taken <= of.free


@given(SITUATIONS, st.integers(0, 2), st.integers(0, 100), st.booleans())
def test_cpu_hints_equal_the_reference(of: Situation, left: int, percent: int, by_socket: bool) -> None:
    """`left` CPUs were left by init containers of the pod; asked are `percent` of the machine's CPUs."""
    request = max(1, len(of.rig.rows) * percent // 100)
    reusable = set(sorted(of.free)[-left:]) if left else set()
    available = of.free - reusable

    got = cpu_hints(of.rig.topology, available, reusable, request, Mode.KUBELET, by_socket=by_socket)

    assert isinstance(got, tuple)
    told = [(nodes_of(hint.affinity or 0), hint.preferred) for hint in got]
    assert reference_hints(of.rig, available, reusable, request, by_socket) == told


def test_aligned_by_socket_fewer_sockets_with_more_nodes_are_not_preferred() -> None:
    """
    Aligned by socket, fewer sockets than the least number of nodes fills are not preferred. Five nodes on socket 0 and
    one on socket 1 make three per socket, so four nodes fill two sockets. The five nodes of socket 0 are one socket and
    more nodes than needed.
    """
    of = Rig(tuple(Cpu(id=node, core=node, socket=node // 5, node=node, uncore=node) for node in range(6)))
    free = set(range(6))

    hints = cpu_hints(of.topology, free, set(), 4, Mode.KUBELET, by_socket=True)

    assert isinstance(hints, tuple)
    assert [0b011111] == [hint.affinity for hint in hints if not hint.preferred]
    assert reference_hints(of, free, set(), 4, True) == [
        (nodes_of(each.affinity or 0), each.preferred) for each in hints
    ]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=16))
def test_unevenness_is_the_rounded_standard_deviation_in_integers(amounts: list[int]) -> None:
    """Unevenness is the rounded standard deviation, computed without floating point."""
    assert deviation(amounts) == unevenness(amounts) / 1000


def wide(nodes: int, each: int) -> CpuTopology:
    return CpuTopology(
        Cpu(id=node * each + i, core=node * each + i, socket=node // 32, node=node, uncore=node)
        for node in range(nodes)
        for i in range(each)
    )


def test_fragments_of_cores_end_where_the_kubelet_never_returns() -> None:
    """
    Four nodes with five free CPUs each are asked for seven cores: one of each and three more. Two nodes have six CPUs left
    for these three, but whole cores only for two of them, and there the kubelet's hand-out goes on for ever.
    """
    of = rig(1, 4, 1, 3, 2, joined=False, apart=False)
    free = {row.id for row in of.rows} - {0, 6, 12, 18}

    taken = take_distributed(of.topology, free, 14, 2)

    assert [4, 4, 4, 2] == [len(taken & of.of("node", node)) for node in range(4)]


def test_the_best_combination_of_four_nodes_is_kept_to_the_end() -> None:
    """
    The best combination of four nodes is kept, whatever is looked at after it. The two emptiest nodes of sockets 0 and
    1 each leave the machine most even. The kubelet remembers them in a place where the combination with the last node
    of socket 2 is written afterwards.
    """
    sockets, free_of = [0, 0, 0, 1, 1, 2, 2, 2, 2], [12, 12, 12, 18, 19, 10, 10, 10, 10]
    of = CpuTopology(
        Cpu(id=node * 20 + i, core=node * 20 + i, socket=socket, node=node, uncore=node)
        for node, socket in enumerate(sockets)
        for i in range(20)
    )
    free = {node * 20 + i for node, amount in enumerate(free_of) for i in range(amount)}

    taken = take_distributed(of, free, 40, 1)

    assert [10, 10, 0, 10, 10, 0, 0, 0, 0] == [len(taken & of.in_node[node]) for node in range(9)]


@pytest.mark.parametrize("count", [1, 100, 129, 255, 500])
def test_an_idle_machine_of_64_numa_nodes_is_distributed_over_evenly(count: int) -> None:
    of = wide(64, 8)

    taken = take_distributed(of, set(of.node_of), count, 1)

    per_node = [given for node in range(64) if (given := len(taken & of.in_node[node]))]
    assert count == len(taken)
    assert max(per_node) - min(per_node) <= 1
    assert -(-count // 8) == len(per_node)


def test_choices_without_end_are_given_up_with_an_error_that_says_so() -> None:
    """All 64 nodes differ, and dozens are needed: more combinations than anybody can look at."""
    of = wide(64, 70)
    free = {cpu for node in range(64) for cpu in list(of.in_node[node])[: 6 + node]}

    with pytest.raises(TooMuchWork, match="ways to distribute 1200 CPUs over 64 NUMA nodes"):
        take_distributed(of, free, 1200, 1)


class Watched(list[int]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize(("nodes", "count"), [(64, 300), (1024, 3_000), (1024, 4_000)])
def test_the_limit_on_work_counts_what_a_choice_costs_on_that_machine(nodes: int, count: int) -> None:
    """Free CPUs are gone through at least once per choice: a choice of 1,024 nodes is 16 times as dear as one of 64."""
    free = Watched(Random(1).choices(range(4, 9), k=nodes))

    with pytest.raises(TooMuchWork):
        best_split(wide(nodes, 8), free, count, 1)

    assert 0 < free.times * nodes <= 2 * MOST_STEPS


def test_thousands_of_equal_nodes_are_one_choice() -> None:
    """Nodes are not chosen one inside the other: a choice may have more of them than Python has stack."""
    assert [tuple(range(2_500))] == [*choices([8] * 3_000, range(3_000), 2_500)]


@given(st.lists(st.integers(1, 3), max_size=9), st.integers(1, 10))
def test_choices_hold_the_first_of_equal_neighbours_in_order(free: list[int], size: int) -> None:
    """The choices are the subsets that hold the first of equal neighbours, in order."""
    runs = [[node for node, _ in run] for _, run in groupby(enumerate(free), key=lambda each: each[1])]
    expected = [
        subset
        for subset in combinations(range(len(free)), size)
        if all(chosen == run[: len(chosen)] for run in runs for chosen in [[node for node in run if node in subset]])
    ]

    assert expected == [*choices(free, range(len(free)), size)]
