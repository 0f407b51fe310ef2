"""Scores by what NUMA nodes have left, against a reference that was written from their rule, one step at a time."""

import random
from fractions import Fraction
from itertools import chain, combinations
from statistics import variance

import pytest
from decision_support import GIB, container, machine, node, pod

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.events import Allocation, MemoryBlock
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy, Scope
from topoalign.core.scoring.numa import NumaNeed, NumaScore, numa_need, numa_score
from topoalign.core.scoring.zones import Zone, zones_of

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE, reserved_cpus="0")
TRIES = 2_000


def zone(number: int, left: dict[ResourceName, int], costs: dict[int, int] | None = None) -> Zone:
    return Zone(number, left, left, left, costs or {})


def need(*containers: dict[ResourceName, int], scope: str = "container", policy: str = "single-numa-node") -> NumaNeed:
    names = {name for each in containers for name in each}
    whole = {name: sum(each.get(name, 0) for each in containers) for name in sorted(names)}
    return NumaNeed(policy, scope, 8, True, containers, whole)


def by_rule_alone(kind: NumaScore, wanted: dict[ResourceName, int], left: dict[ResourceName, int]) -> int:
    """One NUMA node, by the formula of each strategy in exact numbers."""
    shares = [Fraction(amount, left.get(name) or 1) if left.get(name) else None for name, amount in wanted.items()]
    if kind is NumaScore.BALANCED:
        if any(share is None or share > 1 for share in shares):
            return 0
        exact = [share for share in shares if share is not None]
        return 100 if len(exact) == 1 else int((1 - variance(map(float, exact))) * 100)
    each = [0 if share is None or share > 1 else share * 100 for share in shares]
    if kind is NumaScore.LEAST_ALLOCATED:
        each = [0 if share is None or share > 1 else (1 - share) * 100 for share in shares]
    return sum(map(int, each)) // len(each)


def by_rule(kind: NumaScore, asked: NumaNeed, zones: list[Zone]) -> int:
    parts = [asked.whole] if asked.scope == "pod" else list(asked.containers)
    if kind is not NumaScore.LEAST_NUMA_NODES:
        if asked.policy != "single-numa-node":
            return 0
        scores = [[by_rule_alone(kind, dict(part), dict(zone.available)) for zone in zones] for part in parts]
        return int(Fraction(sum(min([s for s in each if s], default=0) for each in scores), len(parts)))
    left = [dict(zone.available) for zone in zones]
    used, near = [], []
    for part in parts:
        if not any(name in each for name in part for each in left):
            continue
        every = [combinations(range(len(zones)), size) for size in range(1, len(zones) + 1)]
        fitting = [
            sets
            for sets in chain.from_iterable(every)
            if all(sum(left[i].get(name, 0) for i in sets) >= amount for name, amount in part.items())
        ]
        if not fitting:
            return 0
        size = len(fitting[0])

        def apart(sets: tuple[int, ...]) -> Fraction:
            pairs = [zones[i].costs.get(zones[j].id, 255) for i in sets for j in sets]
            return Fraction(sum(pairs), len(pairs))

        chosen = sorted((sets for sets in fitting if len(sets) == size), key=apart)[0]
        used.append(size)
        near.append(apart(chosen) == min(map(apart, combinations(range(len(zones)), size))))
        for name, amount in part.items():
            for i in chosen:
                taken = min(amount, left[i].get(name, 0))
                left[i][name], amount = left[i].get(name, 0) - taken, amount - taken
    return 100 if not used else 100 - 12 * max(used) + (6 if all(near) else 0)


def random_zones(chance: random.Random) -> list[Zone]:
    count = chance.choice((1, 2, 2, 4))
    costs = {
        i: {j: 10 if i == j else chance.choice((12, 20, 32)) for j in range(count) if chance.random() < 0.95}
        for i in range(count)
    }
    return [
        zone(
            i,
            {CPU: chance.randrange(0, 9), MEMORY: chance.randrange(0, 1 << 40)}
            | ({GPU: chance.randrange(0, 3)} if chance.random() < 0.8 else {}),
            costs[i],
        )
        for i in range(count)
    ]


def random_container(chance: random.Random) -> dict[ResourceName, int]:
    wanted = {CPU: chance.randrange(1, 9), MEMORY: chance.randrange(1, 1 << 39)}
    return wanted | ({GPU: chance.randrange(1, 4)} if chance.random() < 0.5 else {})


@pytest.mark.parametrize("kind", NumaScore)
def test_scores_are_those_of_the_rule_for_random_nodes_and_pods(kind: NumaScore) -> None:
    chance, seen = random.Random(7), set()
    for _ in range(TRIES):
        zones = random_zones(chance)
        containers = [random_container(chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        policy = chance.choice(("single-numa-node", "single-numa-node", "restricted"))
        asked = need(*containers, scope=chance.choice(("container", "pod")), policy=policy)

        score = numa_score(kind, asked, zones)

        assert by_rule(kind, asked, zones) == score
        seen.add(score)
    assert len(seen) > 4 and max(seen) <= 100 and min(seen) == 0


@pytest.mark.parametrize("kind", NumaScore)
def test_every_node_is_equal_for_a_pod_that_is_not_guaranteed(kind: NumaScore) -> None:
    asked = need({CPU: 2})._replace(guaranteed=False)

    assert 100 == numa_score(kind, asked, [zone(0, {CPU: 1})])


def test_a_pod_that_asks_for_nothing_of_numa_nodes_scores_best() -> None:
    storage = ResourceName("example.com/disk")

    assert 100 == numa_score(NumaScore.LEAST_NUMA_NODES, need({storage: 1}), [zone(0, {CPU: 1})])


def test_more_numa_nodes_than_the_kubelet_allows_do_not_go_below_0() -> None:
    zones = [zone(i, {CPU: 1}) for i in range(10)]

    assert 0 == numa_score(NumaScore.LEAST_NUMA_NODES, need({CPU: 10}), zones)


def test_sets_of_very_many_numa_nodes_are_not_compared() -> None:
    """Of 40 NUMA nodes there are 658,008 sets of five; of those of two there are 780."""
    zones = [zone(i, {CPU: 1}) for i in range(40)]

    assert 82 == numa_score(NumaScore.LEAST_NUMA_NODES, need({CPU: 2}), zones)
    assert 0 == numa_score(NumaScore.LEAST_NUMA_NODES, need({CPU: 5}), zones)


def test_the_zones_of_a_node_tell_what_is_kept_held_and_ill() -> None:
    """Two NUMA nodes of 8 CPUs, 2 GPUs and a NIC: a container has GPU-1, CPUs 2-3 and memory of node 0; GPU-2 is ill."""
    block = MemoryBlock(resource=MEMORY, nodes=(0,), size=GIB, taken=(GIB,))
    held = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-1"),)}, cpus="2-3", memory=(block,))

    first, second = zones_of(node(machine(), unhealthy=["GPU-2"]).holding(held), RULES)

    assert {CPU: 8000, MEMORY: 64 * GIB, GPU: 2, NIC: 1} == first.capacity == second.capacity
    assert {CPU: 7000, MEMORY: 64 * GIB, GPU: 2, NIC: 1} == first.allocatable
    assert {CPU: 5000, MEMORY: 63 * GIB, GPU: 1, NIC: 1} == first.available
    assert {CPU: 8000, MEMORY: 64 * GIB, GPU: 1, NIC: 1} == second.allocatable == second.available
    assert ({0: 10, 1: 21}, {0: 21, 1: 10}) == (first.costs, second.costs)


def test_a_device_of_no_known_numa_node_is_in_no_zone() -> None:
    first, _ = zones_of(node(machine(gpus=(None, 0), nics=(None,), bare_nodes=0)), RULES)

    assert 1 == first.capacity[GPU]
    assert NIC not in first.capacity


def test_the_need_of_a_pod_is_what_its_containers_request() -> None:
    asked = pod(container("a", gpus=1, cpus=2, gib=1), container("b", cpus=1, gib=1))

    found = numa_need(read_pod(asked, RULES))

    assert ({GPU: 1, CPU: 2000, MEMORY: GIB}, {CPU: 1000, MEMORY: GIB}) == found.containers
    assert {GPU: 1, CPU: 3000, MEMORY: 2 * GIB} == found.whole
    assert (Policy.SINGLE_NUMA_NODE, Scope.CONTAINER, 8, True) == found[:4]
