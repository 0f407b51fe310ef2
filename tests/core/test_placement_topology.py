"""Device policy `topology`: its key by hand-made cases, and the whole against a naive reading of its docstring."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seam_reference import at_random, naive_rank

from topoalign.core.admission.alternatives import rank_alternatives
from topoalign.core.model.decisions import PlacementContext, PreferenceQuestion
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Fabric, Topology
from topoalign.core.placement.gpu_fragmentation import measure_fragmentation
from topoalign.core.placement.gpus import bandwidth as set_scores
from topoalign.core.placement.gpus.bandwidth import Links, Members, NicLocality, Nics, Seam, SetScorer
from topoalign.core.placement.gpus.device_policy import BestEffort, DevicePolicy, GpuChoice
from topoalign.core.placement.gpus.topology import ByTopology, SetOrder, by_topology
from topoalign.core.placement.preference import choose_gpu_set, prefer
from topoalign.core.placement.preference import set_scorer as machine_scorer
from topoalign.machines import load_machine

PAIRS = load_machine("8x-nvlink-pairs").topology
VOLTA = load_machine("dgx1-volta").topology


def gpus(*indexes: int) -> tuple[DeviceID, ...]:
    return tuple(DeviceID(f"GPU-{i}") for i in indexes)


def chosen(topology: Topology, free: tuple[DeviceID, ...], size: int, nics: int = 0) -> tuple[DeviceID, ...]:
    context = PlacementContext(free=free, nics=tuple(topology.devices.get(NIC, ())), nics_wanted=nics)
    return prefer(topology, GPU, free, (), size, Placement.TOPOLOGY, context=context)


@given(st.data())
def test_the_set_is_the_one_that_a_naive_reading_of_the_rule_finds(data: st.DataObject) -> None:
    count = data.draw(st.integers(4, 7))
    table, strength = ([[0] * count for _ in range(count)] for _ in range(2))
    for a, b in combinations(range(count), 2):
        table[a][b] = table[b][a] = data.draw(st.sampled_from([10, 20, 50, 110, 250]))
        strength[a][b] = strength[b][a] = table[a][b] + data.draw(st.sampled_from([0, 0, 10]))
    switch = data.draw(st.sampled_from([[], [9, 18] * 4]))[:count]
    free = tuple(data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=3)))
    offered = free[: data.draw(st.integers(2, len(free)))]
    size = data.draw(st.integers(1, len(offered) - 1))
    required = tuple(data.draw(st.lists(st.sampled_from(offered), unique=True, max_size=size)))
    some = st.frozensets(st.integers(0, count - 1))
    local = data.draw(st.lists(st.tuples(some, some), max_size=3))
    localities = [NicLocality(near_by, near_by | near) for near_by, near in local]
    nics = Nics(data.draw(st.integers(0, len(local))), localities)

    got = by_topology(
        SetScorer(table, Links(strength, [(None, links) for links in switch])), offered, required, size, free, nics
    )

    sets = [members for members in combinations(sorted(offered), size) if {*required} <= {*members}]
    assert got == min(sets, key=lambda each: naive_rank(table, strength, each, free, nics, switch))


@pytest.mark.parametrize(
    ("free", "size", "expected"),
    [
        pytest.param(gpus(0, 1, 2, 4), 1, gpus(4), id="a single GPU is the odd one with the weakest links"),
        pytest.param(gpus(1, 4, 5, 6, 7), 1, gpus(1), id="it breaks no pair"),
        pytest.param(gpus(0, 2, 3, 4, 5), 2, gpus(4, 5), id="a pair is a linked one, and leaves a socket whole"),
        pytest.param(gpus(0, 1, 2, 3, 4, 5), 2, gpus(4, 5), id="that leaves four of one socket together"),
        pytest.param(gpus(0, 1, 2, 4, 5), 3, gpus(0, 1, 2), id="three are a pair and one of its socket"),
        pytest.param(gpus(0, 1, 2, 3, 4, 5, 6, 7), 4, gpus(0, 1, 2, 3), id="four are two pairs of one socket"),
    ],
)
def test_on_linked_pairs(free: tuple[DeviceID, ...], size: int, expected: tuple[DeviceID, ...]) -> None:
    assert expected == chosen(PAIRS, free, size)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, (0,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (6, (1, 2, 3, 4, 5, 6)), (7, (1, 2, 3, 4, 5, 6, 7))],
)
def test_a_gpu_off_the_fabric_is_first_for_one_and_last_for_several(size: int, expected: Members) -> None:
    """GPU 0 of an NVSwitch board has no NVLink: four GPUs with it have 37 GB/s, four others 474 (NCCL's plan)."""
    board = on_switch(0, *[18] * 7)

    assert expected == by_topology(board, range(8), (), size)


def on_switch(*links: int) -> SetScorer:
    """GPUs on one NUMA node, with so many links to an NVSwitch."""
    table = [[20 + 100 * min(a, b) if i != j else 0 for j, b in enumerate(links)] for i, a in enumerate(links)]
    return SetScorer(table, Links(table, [("switch", count) for count in links]))


def test_six_of_a_dgx_1_are_those_with_the_strongest_seam() -> None:
    """NCCL plans 47.9 GB/s for four of the sets of six, and 24.0 or 26.5 for the other 24."""
    got = prefer(VOLTA, GPU, gpus(*range(8)), (), 6, Placement.TOPOLOGY)

    assert got in [gpus(*(gpu for gpu in range(8) if gpu not in pair)) for pair in ((0, 4), (1, 5), (2, 6), (3, 7))]


def test_of_equal_seams_the_set_that_cuts_the_fewest_links_is_taken() -> None:
    """Two GPUs out of four: each pair with two NVLinks leaves the other one of these."""
    free = gpus(0, 1, 2, 3)

    assert {gpus(0, 3), gpus(1, 2)} >= {chosen(VOLTA, free, 2)}
    assert gpus(0, 1) == prefer(VOLTA, GPU, free, (), 2, Placement.SIMPLE)


def test_free_gpus_that_are_not_offered_count_for_what_is_left() -> None:
    """GPU 0 can be had with its partner 1, which is free but not offered, so it is spared."""
    context = PlacementContext(free=gpus(0, 1, 2))

    assert gpus(2) == prefer(PAIRS, GPU, gpus(0, 2), (), 1, Placement.TOPOLOGY, context=context)
    assert gpus(0) == prefer(
        PAIRS, GPU, gpus(0, 2), (), 1, Placement.TOPOLOGY, context=PlacementContext(free=gpus(0, 2, 3))
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
        context=PlacementContext(free=every, nics=free_nic, nics_wanted=1),
    )

    assert (every[3],) == asked
    assert (every[0],) == prefer(machine, GPU, every, (), 1, Placement.TOPOLOGY, context=PlacementContext(free=every))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("held", [(), (0, 5, 6), (1, 2, 3, 8, 9)])
def test_on_machines_with_many_gpus_the_seam_is_the_strongest(size: int, held: Sequence[int]) -> None:
    """Sixteen GPUs behind PCIe switches with two and four each, without NVLinks or with one between the two of a switch."""
    free = [gpu for gpu in range(16) if gpu not in held]
    for nvlinks in (0, 4):
        table = [
            [pcie_tree(a, b) + 100 * nvlinks * (a // 2 == b // 2 and a != b) for b in range(16)] for a in range(16)
        ]
        scorer = SetScorer(table)
        if size > len(free):
            continue

        got = by_topology(scorer, free, (), size)

        assert size == len(got)
        assert max(map(scorer.seam, combinations(free, size))) == scorer.seam(got)


def test_a_set_that_remains_by_removing_gpus_is_compared_too() -> None:
    """Six of 12 GPUs behind PCIe switches: no set that grows from a GPU is as good as one that is left."""
    scorer = SetScorer([[pcie_tree(a, b) for b in range(16)] for a in range(16)])
    free = (2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    order = SetOrder(scorer, free)

    got = by_topology(scorer, free, (), 6)

    assert min(map(order.rank, combinations(free, 6))) == order.rank(got)


def pcie_tree(a: int, b: int) -> int:
    if a == b:
        return 0
    return 50 if a // 2 == b // 2 else 40 if a // 4 == b // 4 else 20 if a // 8 == b // 8 else 10


@given(st.data())
@settings(max_examples=40)
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
    scorer = SetScorer([[0, 10], [10, 0]])

    got = choose_gpu_set(ByTopology(), GpuChoice(scorer, available, required, size))

    assert () == got


def test_fragmentation_is_what_the_best_sets_have_lost() -> None:
    """One GPU of each pair is held: no linked pair is left, and the best four are as before without a link."""
    whole = measure_fragmentation(PAIRS, PAIRS.devices[GPU])
    torn = measure_fragmentation(PAIRS, gpus(0, 2, 4, 6))

    assert [(2, 0.0), (4, 0.0), (8, 0.0)] == [(each.size, each.lost) for each in whole.sets]
    assert [(2, Seam(0, 20), Seam(4)), (4, Seam(0, 10), Seam(0, 20))] == [
        (each.size, each.best, each.possible) for each in torn.sets
    ]
    assert [1 - 20 / 48, 1 - 12 / 20] == [each.lost for each in torn.sets]
    assert 0.0 == whole.overall == measure_fragmentation(PAIRS, gpus(3)).overall
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
    ("name", "size", "said"), [("dgx1-volta", 4, ""), ("dgx2", 4, "all 1820 are too many to compare"), ("dgx2", 1, "")]
)
def test_explain_says_where_not_all_sets_were_compared(name: str, size: int, said: str) -> None:
    topology = load_machine(name).topology
    every = tuple(topology.devices[GPU])
    asked = PreferenceQuestion(
        resource=GPU,
        available=every,
        must_include=(),
        size=size,
        container=ContainerName("c"),
        context=PlacementContext(free=every),
    )
    got = prefer(topology, GPU, every, (), size, Placement.TOPOLOGY, context=asked.context)

    won, *others = rank_alternatives(topology, GPU, every, asked, got, (), Placement.TOPOLOGY)

    assert said in won.why
    assert bool(said) == ("too many" in won.why)
    assert all(other.why for other in others)


def test_sixty_four_gpus_without_structure_stay_within_the_limits() -> None:
    """
    A choice from sixty-four GPUs without structure stays within the limits of the search at each size, and the answer
    holds what is required.
    """
    chance = Random(1)
    table = [[0] * 64 for _ in range(64)]
    for a, b in combinations(range(64), 2):
        table[a][b] = table[b][a] = chance.randint(10, 300)
    scorer = SetScorer(table)

    for size in (1, 2, 8, 33, 63):
        got = by_topology(scorer, range(64), (60,), size)
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


@settings(max_examples=60)
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
        patch.setattr(set_scores, "MOST_KEPT", most)
        kept = SetScorer(table)
        got = [answer(kept, *each) for each in asked * 2]

    assert [answer(SetScorer(table), *each) for each in asked] * 2 == got
    remembered = (kept.own.cache_info().currsize, kept.seam.cache_info().currsize, len(kept._chosen))
    assert most >= max(remembered), "what is remembered is bounded"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ((0, 5), "its seam is PCIe across sockets, not 2 NVLinks, 40 GB/s"),
        ((0, 4), "cuts links worth 1080 to GPUs that stay free, not 1040"),
    ],
)
def test_the_first_element_of_the_key_that_differs_is_the_reason(other: Members, why: str) -> None:
    scorer = machine_scorer(VOLTA)

    assert why == SetOrder(scorer, range(8)).difference(other, (0, 3))


def test_nics_are_the_reason_where_seams_are_equal() -> None:
    """Two of three GPUs at a switch, of which each has a NIC of its own; those of GPU 1 and 2 are free."""
    nics = Nics(2, [NicLocality(frozenset({gpu}), frozenset({0, 1, 2})) for gpu in (1, 2)])
    order = SetOrder(on_switch(18, 18, 18), range(3), nics)

    assert (1, 2) == min(map(order.rank, combinations(range(3), 2)))[-1]
    assert "1 local and 2 near NICs, not 2 and 2" == order.difference((0, 1), (1, 2))
