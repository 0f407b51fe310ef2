"""Policy `topology`: its three parts by hand-made cases, and the whole against a naive reading of its docstring."""

from itertools import combinations
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_reference import at_random, walked

from topoalign.core.admission.alternatives import considered
from topoalign.core.model.decisions import PlacementContext, PreferenceQuestion
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Fabric, Topology
from topoalign.core.placement.fragmentation import fragmentation
from topoalign.core.placement.gpus import set_scorer
from topoalign.core.placement.gpus.best_effort import BestEffort
from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice, Members
from topoalign.core.placement.gpus.scores import total
from topoalign.core.placement.gpus.set_scorer import Nics, SetScorer
from topoalign.core.placement.gpus.topology import ByTopology, by_topology
from topoalign.core.placement.preference import choose, prefer
from topoalign.machines import load_machine

PAIRS = load_machine("8x-nvlink-pairs").topology
VOLTA = load_machine("dgx1-volta").topology


def gpus(*indexes: int) -> tuple[DeviceID, ...]:
    return tuple(DeviceID(f"GPU-{i}") for i in indexes)


def chosen(topology: Topology, free: tuple[DeviceID, ...], size: int, nics: int = 0) -> tuple[DeviceID, ...]:
    beside = PlacementContext(free=free, nics=tuple(topology.devices.get(NIC, ())), nics_wanted=nics)
    return prefer(topology, GPU, free, (), size, Placement.TOPOLOGY, beside=beside)


def naive(
    scores: list[list[int]],
    free: tuple[int, ...],
    offered: tuple[int, ...],
    required: tuple[int, ...],
    size: int,
    nics: Nics,
) -> tuple[int, ...]:
    """Every set, every partition."""
    everything = range(len(scores))

    def score(members: tuple[int, ...]) -> int:
        return sum(scores[a][b] for a, b in combinations(members, 2))

    def without(rest: tuple[int, ...], gone: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(each for each in rest if each not in gone)

    def split(rest: tuple[int, ...], k: int) -> int:
        return max(score(small) + whole(without(rest, small), k) for small in combinations(rest, len(rest) % k))

    def whole(rest: tuple[int, ...], k: int) -> int:
        if not rest:
            return 0
        firsts = [(rest[0], *others) for others in combinations(rest[1:], k - 1)]
        return max(score(first) + whole(without(rest, first), k) for first in firsts)

    def best(k: int) -> int:
        return max(map(score, combinations(everything, k)))

    def worth(members: tuple[int, ...]) -> float:
        rest = without(tuple(sorted({*free, *offered})), members)
        own = score(members) / best(size) if best(size) else 0
        left = sum(split(rest, k) / best(k) for k in (2, 4, 8) if k <= len(rest) and best(k))
        near = sorted((max(row[m] for m in members) for row in nics.nearness), reverse=True)[: nics.wanted]
        return round(own + left / 2 + (sum(near) / (50 * nics.wanted) / 10 if nics.wanted else 0), 9)

    sets = [members for members in combinations(sorted(offered), size) if {*required} <= {*members}]
    return min(sets, key=lambda members: (-worth(members), members))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_set_is_the_one_that_a_naive_reading_of_the_rule_finds(data: st.DataObject) -> None:
    count = data.draw(st.integers(4, 7))
    table = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        table[a][b] = table[b][a] = data.draw(st.sampled_from([10, 20, 50, 110, 250]))
    free = tuple(data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=3)))
    offered = free[: data.draw(st.integers(2, len(free)))]
    size = data.draw(st.integers(1, len(offered) - 1))
    required = tuple(data.draw(st.lists(st.sampled_from(offered), unique=True, max_size=size)))
    rows = data.draw(st.lists(st.lists(st.sampled_from([10, 30, 50]), min_size=count, max_size=count), max_size=3))
    nics = Nics(data.draw(st.integers(0, len(rows))), rows)

    expected = naive(table, free, offered, required, size, nics)

    assert expected == by_topology(SetScorer(table), offered, required, size, free, nics)


@pytest.mark.parametrize(
    ("free", "size", "expected"),
    [
        pytest.param(gpus(0, 1, 2, 4), 1, gpus(2), id="a single GPU breaks no pair while there is an odd one"),
        pytest.param(gpus(1, 4, 5, 6, 7), 1, gpus(1), id="nor on the other socket"),
        pytest.param(gpus(0, 2, 3, 4, 5), 2, gpus(2, 3), id="a pair is a linked one"),
        pytest.param(gpus(0, 1, 2, 3, 4, 5), 2, gpus(4, 5), id="and leaves four of one socket together"),
        pytest.param(gpus(0, 1, 2, 3, 4, 5, 6, 7), 4, gpus(0, 1, 2, 3), id="four are two pairs of one socket"),
    ],
)
def test_on_linked_pairs(free: tuple[DeviceID, ...], size: int, expected: tuple[DeviceID, ...]) -> None:
    assert expected == chosen(PAIRS, free, size)


def test_of_two_sets_the_one_is_taken_that_leaves_more() -> None:
    """Two GPUs out of four: a pair that leaves a pair, and not the very best pair, which would leave a poor one."""
    free = gpus(0, 1, 2, 3)

    assert {gpus(0, 3), gpus(1, 2)} >= {chosen(VOLTA, free, 2)}
    assert gpus(0, 1) == prefer(VOLTA, GPU, free, (), 2, Placement.SIMPLE)


def test_free_gpus_that_are_not_offered_count_for_what_is_left() -> None:
    """GPU 0 can be had with its partner 1, which is free but not offered, so it is spared."""
    beside = PlacementContext(free=gpus(0, 1, 2))

    assert gpus(2) == prefer(PAIRS, GPU, gpus(0, 2), (), 1, Placement.TOPOLOGY, beside=beside)
    assert gpus(0) == prefer(
        PAIRS, GPU, gpus(0, 2), (), 1, Placement.TOPOLOGY, beside=PlacementContext(free=gpus(0, 2, 3))
    )


def test_nics_that_are_asked_for_are_weighed() -> None:
    """Only the NIC beside GPU 3 is free: a single GPU that asks for a NIC gets GPU 3, one that does not gets the lowest."""
    machine = load_machine("hgx-h100").topology
    every = tuple(machine.devices[GPU])
    free_nic = (tuple(machine.devices[NIC])[3],)

    asked = prefer(
        machine,
        GPU,
        every,
        (),
        1,
        Placement.TOPOLOGY,
        beside=PlacementContext(free=every, nics=free_nic, nics_wanted=1),
    )

    assert (every[3],) == asked
    assert (every[0],) == prefer(machine, GPU, every, (), 1, Placement.TOPOLOGY, beside=PlacementContext(free=every))


@pytest.mark.parametrize("size", [1, 2, 5, 8, 16])
def test_on_machines_with_many_gpus_the_set_is_no_worse_than_others(size: int) -> None:
    """On machines with more GPUs than can be compared, the chosen set is no worse than others."""
    topology = load_machine("dgx2").topology
    every = tuple(topology.devices[GPU])
    outlook = SetScorer([[0 if a == b else 650 if a // 8 == b // 8 else 610 for b in range(16)] for a in range(16)])

    ours = by_topology(outlook, range(16), (), size)

    assert size == len(ours)
    assert outlook.own((*range(size),)) <= outlook.own(ours)
    assert size == len(prefer(topology, GPU, every, (), size, Placement.TOPOLOGY, beside=PlacementContext(free=every)))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_input_is_irrelevant_and_required_gpus_included(data: st.DataObject) -> None:
    """The order of the input has no influence, and what is required is included."""
    every = list(VOLTA.devices[GPU])
    free = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    size = data.draw(st.integers(1, len(free)))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=size))

    expected = prefer(VOLTA, GPU, sorted(free), must, size, Placement.TOPOLOGY)

    assert expected == prefer(VOLTA, GPU, free, must[::-1], size, Placement.TOPOLOGY)
    assert {*must} <= {*expected} <= {*free}
    assert size == len(expected)


@pytest.mark.parametrize(
    ("available", "required", "size"),
    [([0, 1], [], 0), ([0, 1], [], -1), ([0, 1], [], 3), ([0, 0], [], 1), ([0, 1], [2], 1), ([0, 99], [], 1)],
)
def test_what_cannot_be_meant_gets_no_preference(available: list[int], required: list[int], size: int) -> None:
    outlook = SetScorer([[0, 10], [10, 0]])

    got = choose(ByTopology(), GpuChoice(outlook, available, required, size))

    assert () == got


def test_fragmentation_is_what_the_best_sets_have_lost() -> None:
    """One GPU of each pair is held: no linked pair is left, and the best four are without a link."""
    whole = fragmentation(PAIRS, PAIRS.devices[GPU])
    torn = fragmentation(PAIRS, gpus(0, 2, 4, 6))

    assert [(2, 0.0), (4, 0.0), (8, 0.0)] == [(each.size, each.lost) for each in whole.sets]
    assert [(2, 20, 430), (4, 80, 940)] == [(each.size, each.best, each.possible) for each in torn.sets]
    assert 0.0 == whole.overall == fragmentation(PAIRS, gpus(3)).overall
    assert torn.overall == (torn.sets[0].lost + torn.sets[1].lost) / 2


def test_nvlinks_between_two_cliques_of_a_fabric_count_for_nothing() -> None:
    """Four GPUs on one switch, the fabric manager keeps 0 and 2 apart from 1 and 3: pairs are made within a clique."""
    tray = load_machine("gb200-tray").topology
    cliques = tuple(
        msgspec.structs.replace(gpu, fabric=Fabric(cluster="c", clique=gpu.index % 2), numa_affinity=(0,))
        for gpu in tray.gpus
    )
    parted = msgspec.structs.replace(tray, gpus=cliques)

    assert gpus(0, 1) == chosen(tray, gpus(0, 1, 2, 3), 2)
    assert gpus(0, 2) == chosen(parted, gpus(0, 1, 2, 3), 2)


@pytest.mark.parametrize(
    ("name", "size", "said"), [("dgx1-volta", 4, ""), ("dgx2", 4, "matching pairs"), ("dgx2", 1, "matching pairs")]
)
def test_explain_says_where_not_all_sets_were_weighed(name: str, size: int, said: str) -> None:
    topology = load_machine(name).topology
    every = tuple(topology.devices[GPU])
    asked = PreferenceQuestion(
        resource=GPU,
        available=every,
        must_include=(),
        size=size,
        container=ContainerName("c"),
        beside=PlacementContext(free=every),
    )
    got = prefer(topology, GPU, every, (), size, Placement.TOPOLOGY, beside=asked.beside)

    won, *others = considered(topology, GPU, every, asked, got, (), Placement.TOPOLOGY)

    assert said in won.why
    assert bool(said) == ("judged by" in won.why)
    assert all("worth" in other.why for other in others)


def test_sixty_four_gpus_without_structure_stay_within_the_limits() -> None:
    """
    A choice from sixty-four GPUs without structure stays within the limits of the search at each size, and the answer
    holds what is required.
    """
    chance = Random(1)
    table = [[0] * 64 for _ in range(64)]
    for a, b in combinations(range(64), 2):
        table[a][b] = table[b][a] = chance.randint(10, 300)
    outlook = SetScorer(table)

    for size in (1, 2, 8, 33, 63):
        got = by_topology(outlook, range(64), (60,), size)
        assert (size, True) == (len(got), 60 in got)


@pytest.mark.parametrize("count", [10, 12, 16, 32, 64])
@pytest.mark.parametrize("odd", [0, 5])
def test_a_single_gpu_breaks_no_pair_on_large_machines_either(count: int, odd: int) -> None:
    """All GPUs are linked in pairs and free, but for the partner of one: that one is taken, and with a pair for three."""
    table = [[0 if a == b else 430 if a ^ 1 == b else 20 for b in range(count)] for a in range(count)]
    single, partner = 2 * odd if 2 * odd < count else 0, (2 * odd if 2 * odd < count else 0) ^ 1
    free = [gpu for gpu in range(count) if gpu != partner]

    assert (single,) == by_topology(SetScorer(table), free, (), 1)
    assert single in by_topology(SetScorer(table), free, (), 3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_remembered_answers_only_the_same_question(data: st.DataObject) -> None:
    """One scorer is asked by both policies, as on a node between two pods; a fresh one is asked each question alone."""
    table = at_random(Random(data.draw(st.integers(0, 99))), 6, "few")
    some = st.lists(st.integers(0, 5), unique=True, min_size=2)
    asked = []
    for _ in range(8):
        available = data.draw(some)
        size = data.draw(st.integers(1, len(available)))
        required = data.draw(st.lists(st.sampled_from(available), unique=True, max_size=size))
        policy = data.draw(st.sampled_from([ByTopology(), BestEffort()]))
        asked.append((policy, available, required, size, frozenset(data.draw(some))))

    def answer(scorer: SetScorer, policy: DevicePolicy, *question: Any) -> Members:
        return policy.choose(GpuChoice(scorer, *question))

    with pytest.MonkeyPatch.context() as patch:
        most = data.draw(st.sampled_from([2, 4096]))
        patch.setattr(set_scorer, "MOST_KEPT", most)
        kept = SetScorer(table)
        got = [answer(kept, *each) for each in asked * 2]

    assert [answer(SetScorer(table), *each) for each in asked] * 2 == got
    assert most >= max(len(kept._own), len(kept._left), len(kept._chosen)), "what is remembered is bounded"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.integers(0, 9))
def test_what_is_left_counts_by_its_pairs_fours_and_eights(seed: int, left: int) -> None:
    table = at_random(Random(seed), 9, "few")
    rest = tuple(range(left))
    best = {k: max(total(table, members) for members in combinations(range(9), k)) for k in (2, 4, 8)}

    expected = {k: walked(table, rest, (), k)[1] / best[k] for k in best if k <= left}

    assert expected == SetScorer(table).splits(rest)
