"""The searches for the best partition against a walk through all partitions, and against sets that grow greedily."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_reference import PALETTES, at_random, walked

from topoalign.core.admission.alternatives import rank_alternatives
from topoalign.core.model.decisions import PreferenceQuestion
from topoalign.core.model.ids import GPU, ContainerName, DeviceID
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.placement.gpus.device_policy import BestEffort, GpuChoice
from topoalign.core.placement.gpus.seam import Scores, SetScorer, total_score
from topoalign.core.placement.partition import best_split
from topoalign.core.placement.preference import choose_gpu_set, prefer
from topoalign.tools.bench import benchmarks, partition


def hierarchical(random: Random, devices: int) -> Scores:
    """Blocks in blocks, equal or not, of devices side by side or strewn over the machine."""
    scores = [[0] * devices for _ in range(devices)]

    def fill(members: list[int], value: int) -> None:
        if len(members) < 2:
            return
        number = random.randint(2, len(members))
        if random.random() < 0.6:
            parts = [members[len(members) * i // number : len(members) * (i + 1) // number] for i in range(number)]
        else:
            parts = [members[i::number] for i in range(number)]
        for part, other in combinations(parts, 2):
            for a in part:
                for b in other:
                    scores[a][b] = scores[b][a] = value
        steps = (
            [random.choice([10, 100])] * number if random.random() < 0.6 else random.choices([10, 20, 100], k=number)
        )
        for part, step in zip(parts, steps, strict=True):
            fill(part, value + step)

    order = list(range(devices))
    if random.random() < 0.5:
        random.shuffle(order)
    fill(order, random.choice([0, 10]))
    return scores


def any_machine(random: Random, devices: int) -> Scores:
    kind = random.choice([*PALETTES, "tree"])
    return hierarchical(random, devices) if kind == "tree" else at_random(random, devices, kind)


SEEDS = st.integers(0, 2**32 - 1)


def chosen_of(scores: Scores, available: Sequence[int], required: Sequence[int], size: int) -> tuple[int, ...]:
    """What the policy best-effort chooses."""
    return choose_gpu_set(BestEffort(), GpuChoice(SetScorer(scores), available, required, size))


@settings(max_examples=400, deadline=None)
@given(SEEDS)
def test_the_chosen_set_and_the_total_are_those_of_a_walk_up_to_nine_gpus(seed: int) -> None:
    random = Random(seed)
    scores = any_machine(random, 9)
    free = tuple(sorted(random.sample(range(9), random.randint(2, 9))))
    size = random.randint(2, len(free))
    required = random.sample(free, min(size, random.choice([0, 0, 1, 2, 3])))

    expected = walked(scores, free, required, size)

    assert (*expected, True) == best_split(scores, free, required, size)


def test_at_most_one_set_is_smaller_even_if_small_sets_are_worth_more() -> None:
    """Pairs would be worth more; two sets of three and one of two are asked for."""
    pairs = [[0 if a == b else 110 if a // 2 == b // 2 else 10 for b in range(8)] for a in range(8)]

    assert ((0, 1, 2), 370, True) == best_split(pairs, range(8), [], 3)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from([6, 9, 11, 24]))
def test_the_order_of_the_input_has_no_say_and_what_is_required_is_in(seed: int, devices: int) -> None:
    random = Random(seed)
    scores = any_machine(random, devices)
    free = random.sample(range(devices), random.randint(3, devices))
    size = random.randint(1, len(free))
    required = random.sample(free, min(size, random.choice([0, 1, 2])))

    chosen = chosen_of(scores, sorted(free), sorted(required), size)

    assert size == len({*chosen})
    assert {*required} <= {*chosen} <= {*free}
    assert chosen == chosen_of(scores, free, required[::-1], size)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from([8, 11, 24]))
def test_a_device_that_is_taken_away_is_not_in_the_next_answer(seed: int, devices: int) -> None:
    random = Random(seed)
    scores = any_machine(random, devices)
    size = random.randint(2, devices - 1)
    gone = random.choice(chosen_of(scores, range(devices), [], size))

    without = [device for device in range(devices) if device != gone]

    assert gone not in chosen_of(scores, without, [], size)
    assert () == chosen_of(scores, without, [gone], size)


def in_trays(devices: int, tray: int) -> Scores:
    return [[0 if a == b else 1850 if a // tray == b // tray else 1810 for b in range(devices)] for a in range(devices)]


@pytest.mark.parametrize(
    ("free", "required", "size", "expected"),
    [
        pytest.param(range(72), [], 4, (0, 1, 2, 3), id="a whole tray"),
        pytest.param(range(72), [], 7, (0, 1, 2, 3, 4, 5, 6), id="a tray and most of another"),
        pytest.param(range(72), [70], 8, (0, 1, 2, 3, 68, 69, 70, 71), id="two whole trays, one of them required"),
        pytest.param(range(1, 72), [], 4, (4, 5, 6, 7), id="the first tray that is whole"),
        pytest.param(range(1, 72), [], 3, (1, 2, 3), id="a broken tray is as good for three"),
        pytest.param(range(72), [3, 4], 2, (3, 4), id="required ones of two trays"),
    ],
)
def test_a_rack_of_trays_is_split_into_its_trays(
    free: range, required: list[int], size: int, expected: tuple[int, ...]
) -> None:
    found = best_split(in_trays(72, 4), free, required, size)

    assert (expected, False) == (found.members, found.exact)


def grown_greedily(scores: Scores, size: int) -> tuple[int, int]:
    """The score of the best set that grows by the device that adds most, and the total when the rest is cut likewise."""
    rest, first, points = list(range(len(scores))), None, 0
    while len(rest) > size:
        sets = []
        for start in rest:
            members = [start]
            while len(members) < size:
                others = [other for other in rest if other not in members]
                members.append(max(others, key=lambda other: sum(scores[other][member] for member in members)))
            sets.append((total_score(scores, members), members))
        score, best = max(sets, key=lambda each: (each[0], [-member for member in sorted(each[1])]))
        first = score if first is None else first
        points += score
        rest = [device for device in rest if device not in best]
    return first or 0, points + total_score(scores, rest)


@pytest.mark.parametrize("palette", ["any", "two"])
@pytest.mark.parametrize("size", [3, 8, 20])
def test_without_structure_the_split_is_no_worse_than_greedy_and_not_exact(palette: str, size: int) -> None:
    """Without structure, more GPUs are split at least as well as greedily, and the answer says that it is not exact."""
    scores = at_random(Random(size), 32, palette)
    score, points = grown_greedily(scores, size)

    found = best_split(scores, range(32), [], size)

    assert not found.exact
    assert score <= total_score(scores, found.members)
    assert points <= found.total


@pytest.mark.parametrize("size", [2, 3, 31, 63])
def test_sixty_four_gpus_without_structure_have_an_answer_for_any_size(size: int) -> None:
    found = best_split(at_random(Random(1), 64, "any"), range(64), [5], size)

    assert size == len({*found.members})
    assert 5 in found.members


@pytest.mark.parametrize(("required", "expected"), [([], (2,)), ([7], (7,))])
def test_a_set_of_one_is_the_lowest_or_the_one_required(required: list[int], expected: tuple[int, ...]) -> None:
    """Sets of one have no pairs, so none is worth anything; that is exact on any machine."""
    found = best_split(at_random(Random(3), 64, "any"), range(2, 60), required, 1)

    assert (expected, 0, True) == (found.members, found.total, found.exact)


@pytest.mark.parametrize(("gpus", "greedy"), [(8, False), (24, True)])
def test_explain_says_of_a_greedy_choice_that_it_is_greedy(gpus: int, greedy: bool) -> None:
    random = Random(4)
    ids = [DeviceID(f"GPU-{i:02}") for i in range(gpus)]
    links = tuple(Link(a=a, b=b, fabric_links=random.randint(0, 18)) for a, b in combinations(ids, 2))
    topology = Topology(gpus=tuple(Gpu(id=gpu, index=i) for i, gpu in enumerate(ids)), links=links)
    chosen = prefer(topology, GPU, ids, [], 5, "best-effort")

    asked = PreferenceQuestion(
        resource=GPU, available=tuple(ids), must_include=(), size=5, container=ContainerName("main")
    )
    won = rank_alternatives(topology, GPU, ids, asked, chosen, (), "best-effort")[0]

    assert won.chosen
    assert greedy == ("greedy: too many GPUs to compare all partitions" in won.why)


def test_the_benchmark_has_the_cases_whose_figures_are_promised() -> None:
    assert "partition" in benchmarks()
    assert ["8", "16-dgx2", "16-random", "72-clique", "nvl72-trays", "warm"] == [*partition.CALLS]
