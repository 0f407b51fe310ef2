"""`bench placement-quality`: the pods, the proven optimum and the references that it compares with."""

from itertools import combinations, permutations

import pytest

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.bandwidth import Members
from topoalign.core.placement.preference import set_scorer
from topoalign.machines import load_machine
from topoalign.tools.bench.placement_quality import MACHINES, POLICIES, Machine, filling, streams
from topoalign.tools.bench.placement_quality.filling import Task

VOLTA = Machine(set_scorer(load_machine("dgx1-volta").topology))


def test_every_policy_gets_the_same_pods() -> None:
    sizes = {
        policy: [len(members) for members in streams.granted(8, 1, streams.chooser(VOLTA.scorer, policy))]
        for policy in POLICIES
    }

    assert 4 == len(sizes)
    assert all(each == sizes[Placement.TOPOLOGY] for each in sizes.values())
    assert {2, 3, 4, 6, 8} == {*sizes[Placement.TOPOLOGY]}


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_of_a_short_stream_is_the_best_of_all_ways(seed: int) -> None:
    """Five GPUs, whose sets are worth anything: all orders in which the GPUs can be given out."""
    sizes = [size for size in streams.filling(5, seed) if size <= 5]

    def worth(members: Members) -> float:
        return float(sum(13 * a * b % 17 for a, b in combinations(members, 2)))

    best = 0.0
    for order in permutations(range(5)):
        taken, at = 0.0, 0
        for size in sizes:
            members = tuple(sorted(order[at : at + size]))
            taken, at = taken + (worth(members) if size > 1 else 0.0), at + size
        best = max(best, taken)

    assert best == streams.best_sum(5, sizes, worth)


def test_no_policy_is_better_than_the_optimum() -> None:
    for seed in range(3):
        sizes = streams.filling(8, seed)
        most = streams.best_sum(8, sizes, VOLTA.ratio)
        sums = [
            streams.sum_of_choices(8, sizes, streams.chooser(VOLTA.scorer, policy, seed), VOLTA.ratio)
            for policy in POLICIES
        ]

        assert max(sums) <= most + 1e-9


def test_gradient_descent_takes_the_gpu_that_wastes_the_least() -> None:
    """Tasks need 600 or a whole GPU. 300 of the used GPU waste nothing more, of an unused one they do."""
    place = filling.gradient_descent([(Task(1, 600), 1.0), (Task(1, 1000), 1.0)])
    nodes = [(1000, 1000), (500, 1000)]

    assert (1, (200, 1000)) == place(nodes, Task(1, 300))
    assert place(nodes, Task(3, 1000)) is None
    assert place([(500, 900)], Task(1, 1000)) is None


def test_best_fit_takes_the_gpu_with_the_least_left_on_the_fuller_node() -> None:
    nodes = [(300, 1000), (400, 400), (300, 500)]

    assert (2, (0, 500)) == filling.best_fit(nodes, Task(1, 300))
    assert (1, (0, 400)) == filling.best_fit(nodes, Task(1, 400))
    assert filling.best_fit(nodes, Task(2, 1000)) is None


def test_every_machine_is_in_the_catalogue_and_has_a_best_set() -> None:
    assert 11 == len(MACHINES)
    for name in MACHINES:
        assert all(Machine(set_scorer(load_machine(name).topology)).best.values()), name
