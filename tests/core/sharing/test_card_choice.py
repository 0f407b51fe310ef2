"""Which cards a share gets: against a reference that tries all subsets of the cards, and by hand-made cases."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hami_support import shared_gpu
from hypothesis import given
from hypothesis import strategies as st
from seam_reference import naive_rank

from topoalign.core.demand.share_annotations import ANY_GPU, GpuOrder, GpuRules, Selection, Weights
from topoalign.core.demand.shares import Share
from topoalign.core.model.errors import NoFit
from topoalign.core.placement.gpus.bandwidth import Scores, SetScorer, gpu_scores
from topoalign.core.placement.gpus.topology import by_topology
from topoalign.core.sharing.choice import FIELDS, choose_gpus, positions_with_enough
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.machines import load_machine

GIB = 2**30
BLOCK = GIB // 4
PAIRS = gpu_scores(load_machine("8x-nvlink-pairs").topology)

Answer = tuple[int, ...]

APART = {"gpu0": (90, 1), "gpu1": (30, 1), "gpu4": (30, 1), "gpu5": (90, 1)}
"""Of the cards in use 1 and 4 have room, which are on two sockets; the two pairs left are whole."""


def card(index: int, cores: int = 0, used: int = 0, *, memory: int = 8 * GIB, **more: Any) -> SharedGpu:
    """A card of 8 GiB with so many cores and bytes held."""
    return shared_gpu(index, memory, cores, used, **{"model": "NVIDIA H100 80GB HBM3", **more})


@st.composite
def cards(draw: st.DrawFn, index: int) -> SharedGpu:
    cores, memory = draw(st.sampled_from([(0, 0)] * 4 + [(0, 1), (30, 1), (30, 2), (60, 1), (100, 2)]))
    slots = draw(st.sampled_from([0, 0, 3]))
    return card(
        index,
        cores,
        memory * GIB,
        numa_node=draw(st.sampled_from([0, 0, 1, None])),
        memory=(8 * GIB) + draw(st.sampled_from([0, 1, 8 * GIB])),
        model=draw(st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"])),
        usable=draw(st.integers(0, 9)) > 0 and (cores < 100 or draw(st.booleans())),
        all_slots=slots,
        sharers=draw(st.integers(1, max(1, slots))) if cores or memory else 0,
        processes=draw(st.integers(0, 1)),
    )


@st.composite
def all_rules(draw: st.DrawFn) -> GpuRules:
    lists = [None, None, ("GPU-1", "GPU-2", "GPU-3"), ()]
    return GpuRules(
        types=Selection(*draw(st.sampled_from([(None, None), (None, None), (("h100",), None), (None, ("A100",))]))),
        uuids=Selection(draw(st.sampled_from(lists[:3])), draw(st.sampled_from([None, None, ("GPU-0",)]))),
        mutex=draw(st.integers(0, 4)) == 0,
        numa_bind=draw(st.booleans()),
        order=draw(st.sampled_from(GpuOrder)),
        weights=draw(st.sampled_from([Weights(), Weights(0, 1, 0), Weights(2, 0, 1)])),
    )


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[SharedGpu], list[list[int]]]:
    count = draw(st.integers(1, 7))
    table = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        table[a][b] = table[b][a] = draw(st.sampled_from([10, 20, 50, 250]))
    return [draw(cards(index)) for index in range(count)], table


requests = st.builds(
    lambda gpus, cores, memory: Share(gpus, cores, memory),
    cores=st.sampled_from([0, 20, 40, 50, 100, 100]),
    memory=st.sampled_from([1, GIB, 7 * GIB, 12 * GIB]),
    gpus=st.integers(1, 3),
)


class Reference:
    """The rule read one sentence after another; all subsets."""

    def __init__(self, held: Sequence[SharedGpu], scores: Scores, request: Share, rules: GpuRules) -> None:
        self.held, self.scores, self.request, self.rules = held, scores, request, rules
        self.whole = request.cores == 100
        self.free = {at for at, each in enumerate(held) if is_unused(each)}

    def accepts(self, each: SharedGpu) -> bool:
        """Whether the lists, the health and the cordon let the card be chosen."""
        types, uuids = self.rules.types, self.rules.uuids
        model = each.model.lower()
        return (
            each.usable
            and (types.wanted is None or any(name.lower() in model for name in types.wanted))
            and not any(name.lower() in model for name in types.unwanted or ())
            and (uuids.wanted is None or each.device in uuids.wanted)
            and each.device not in (uuids.unwanted or ())
        )

    def has_enough(self, each: SharedGpu) -> bool:
        if (self.whole or self.rules.mutex) and not is_unused(each):
            return False
        if self.whole:
            return each.offered.memory >= self.request.memory
        return (
            each.offered.cores - each.held.cores >= (self.request.cores or 1)
            and each.offered.memory - each.held.memory >= self.request.memory
            and (each.all_slots == 0 or each.all_slots > each.sharers)
        )

    def allowed(self, members: Answer) -> bool:
        """Whether these cards would do, one by one and together."""
        nodes = [self.held[at].numa_node for at in members]
        apart = len(members) > 1 and (None in nodes or len({*nodes}) > 1)
        return all(self.accepts(self.held[at]) and self.has_enough(self.held[at]) for at in members) and not (
            self.rules.numa_bind and apart
        )

    def rank(self, members: Answer) -> tuple[object, ...]:
        """What is compared: for one card or by fullness the cards first, else links first."""
        held, order = [self.held[at] for at in members], self.rules.order
        least = (
            sum(each.offered.cores - each.held.cores for each in held),
            sum((each.offered.memory - each.held.memory) // BLOCK for each in held),
            sum(each.processes for each in held),
        )
        links = naive_rank(self.scores, self.scores, members, self.free)[:-1]
        if self.whole:
            return (links, members)
        if order is GpuOrder.TOPOLOGY_AWARE:
            return (links, least, members)
        if order is not GpuOrder.BEST_FIT:
            full = sum(self.fullness(each) for each in held)
            return (round(-full if order is GpuOrder.BINPACK else full, 6), links, members)
        return (least, links, members) if len(members) == 1 else (links, least, members)

    def fullness(self, each: SharedGpu) -> float:
        weights, asked = self.rules.weights, self.request
        slots = weights.slot * (each.sharers + 1) / each.all_slots if each.all_slots else 0
        cores = weights.core * (each.held.cores + asked.cores) / each.offered.cores
        return slots + cores + weights.memory * (each.held.memory + asked.memory) / each.offered.memory

    def answer(self) -> Answer | None:
        """The best of all sets of this many cards; None if none will do."""
        sets = [m for m in combinations(range(len(self.held)), self.request.gpus) if self.allowed(m)]
        return min(sets, key=self.rank, default=None)


def is_unused(each: SharedGpu) -> bool:
    return each.usable and each.held.cores == each.held.memory == each.sharers == 0


def answer(held: Sequence[SharedGpu], scores: Scores, request: Share, rules: GpuRules = ANY_GPU) -> Answer | None:
    """The indexes of the cards that are given; None if the request is refused."""
    request = request._replace(rules=rules)
    try:
        able = positions_with_enough(held, request, FIELDS)
        return tuple(each.index for each in choose_gpus(held, able, request, SetScorer(scores)))
    except NoFit:
        return None


@given(machines(), requests, all_rules())
def test_the_cards_are_those_that_trying_all_subsets_finds(
    machine: tuple[list[SharedGpu], list[list[int]]], request: Share, rules: GpuRules
) -> None:
    held, scores = machine

    assert Reference(held, scores, request, rules).answer() == answer(held, scores, request, rules)


def test_whole_cards_of_equal_nodes_are_those_with_the_lowest_indexes() -> None:
    """Nothing is left of whole cards, so what runs on them is not compared."""
    held = [card(at, numa_node=at // 2, processes=int(at == 1)) for at in range(4)]
    same = [[10 * (a != b) for b in range(4)] for a in range(4)]
    assert (0, 1) == answer(held, same, share(100, cards=2), GpuRules(numa_bind=True))


def share(cores: int = 20, memory: int = GIB, cards: int = 1) -> Share:
    return Share(cards, cores, memory)


def held_on(machine: Scores, **used: tuple[int, int]) -> list[SharedGpu]:
    """The cards of a machine; of `gpu3` so many cores and GiB are held."""
    amounts = {int(name.removeprefix("gpu")): held for name, held in used.items()}
    return [card(i, amounts.get(i, (0, 0))[0], amounts.get(i, (0, 0))[1] * GIB) for i in range(len(machine))]


@pytest.mark.parametrize(
    ("used", "request_", "expected"),
    [
        pytest.param({"gpu5": (30, 1)}, share(), (5,), id="beside another share"),
        pytest.param({"gpu5": (30, 1), "gpu6": (60, 1)}, share(), (6,), id="where the fewest cores are left"),
        pytest.param({"gpu5": (30, 3), "gpu6": (30, 5)}, share(), (6,), id="of equals where the least memory is left"),
        pytest.param({"gpu5": (90, 1)}, share(), (4,), id="on an unused card, the odd one of a pair"),
        pytest.param({"gpu5": (90, 1)}, share(0), (5,), id="memory alone beside the cores of others"),
        pytest.param({"gpu5": (100, 1)}, share(0), (4,), id="but not where no core is left"),
        pytest.param({"gpu1": (30, 1), "gpu4": (30, 1)}, share(cards=2), (0, 1), id="two on a pair that is broken"),
        pytest.param(APART, share(cards=2), (2, 3), id="two by their link rather than apart on cards in use"),
        pytest.param({"gpu1": (90, 1), "gpu4": (90, 1)}, share(cards=2), (2, 3), id="two by their link"),
        pytest.param({"gpu2": (30, 1), "gpu3": (30, 1), "gpu4": (60, 1)}, share(cards=2), (2, 3), id="linked, in use"),
    ],
)
def test_on_linked_pairs(used: dict[str, tuple[int, int]], request_: Share, expected: Answer) -> None:
    assert expected == answer(held_on(PAIRS, **used), PAIRS, request_)


def test_looks_inside_the_node_for_whole_cards() -> None:
    """Four of three pairs of which one card is busy: two whole pairs, where GaiaGPU takes the first four."""
    scores = [[0 if a == b else 50 if a // 2 == b // 2 else 30 for b in range(6)] for a in range(6)]
    held = held_on(scores, gpu1=(1, 0))

    assert (2, 3, 4, 5) == answer(held, scores, share(100, 0, cards=4))
    assert (0,) == answer(held, scores, share(100))


def test_whole_cards_are_those_of_policy_topology() -> None:
    held = held_on(PAIRS, gpu4=(10, 1), gpu7=(10, 1))
    free = (0, 1, 2, 3, 5, 6)

    assert [by_topology(SetScorer(PAIRS), free, (), size) for size in (1, 2, 3, 4)] == [
        answer(held, PAIRS, share(100, 0, cards=size)) for size in (1, 2, 3, 4)
    ]


def test_cards_that_nobody_may_get_are_not_spared() -> None:
    """GPU 5 is ill, so nobody can get the pair of GPUs 4 and 5 whole: a share breaks nothing on GPU 4."""
    ill = [msgspec.structs.replace(each, usable=each.index != 5) for each in held_on(PAIRS)]

    assert (4,) == answer(ill, PAIRS, share())
    assert (0,) == answer(held_on(PAIRS), PAIRS, share())


def test_of_equally_connected_cards_those_with_the_least_left_are_taken() -> None:
    scores = [[0 if a == b else 10 for b in range(6)] for a in range(6)]
    held = held_on(scores, gpu0=(30, 1), gpu1=(30, 1), gpu2=(60, 1), gpu3=(60, 1))
    busy = [msgspec.structs.replace(each, processes=each.index in (0, 2)) for each in held]

    assert (2, 3) == answer(held, scores, share(cards=2))
    assert (3,) == answer(busy, scores, share())


def test_memory_that_differs_by_pages_is_equal() -> None:
    """Of two unused cards the one that breaks no pair is taken, though the other has a page less."""
    held = [card(index, memory=8 * GIB + spare) for index, spare in enumerate((4096, 4095, 8192))]
    scores = [[0, 250, 10], [250, 0, 10], [10, 10, 0]]

    assert (2,) == answer(held, scores, share())


@pytest.mark.parametrize(
    ("order", "weights", "expected"),
    [
        (GpuOrder.BINPACK, Weights(), (1,)),
        (GpuOrder.BINPACK, Weights(0, 1, 0), (2,)),
        (GpuOrder.SPREAD, Weights(), (3,)),
        (GpuOrder.SPREAD, Weights(0, 0, 1), (0,)),
    ],
)
def test_weights_say_what_makes_a_card_full(order: GpuOrder, weights: Weights, expected: Answer) -> None:
    """Of cores and GiB are held 20 and 1, 40 and 6, 60 and 2, 0 and 2."""
    held = [card(0, 20, GIB), card(1, 40, 6 * GIB), card(2, 60, 2 * GIB), card(3, 0, 2 * GIB)]
    scores = [[0 if a == b else 10 for b in range(4)] for a in range(4)]

    assert expected == answer(held, scores, share(), GpuRules(order=order, weights=weights))


def test_many_cards_are_compared_within_bounds() -> None:
    """Of 40 cards, half of them in use: more sets than are all compared, and more unused ones than are all weighed."""
    scores = [[0 if a == b else 250 if a // 2 == b // 2 else 10 for b in range(40)] for a in range(40)]
    held = [card(i, 30 if i % 4 < 2 else 0, GIB if i % 4 < 2 else 0) for i in range(40)]
    uneven = [card(i, (0, 0, 40, 30)[i % 4], (0, 0, 1, 1)[i % 4] * GIB) for i in range(40)]
    fuller = [card(i, 60, GIB) if i in (8, 12) else each for i, each in enumerate(held)]

    assert (0,) == answer(held, scores, share())
    assert (0, 1, 4, 5) == answer(held, scores, share(cards=4))
    assert (2, 3, 6, 7) == answer(uneven, scores, share(cards=4))
    assert (2,) == answer(held, scores, share(80))
    assert (2, 3) == answer(held, scores, share(100, cards=2))
    assert (2, 3) == answer(held, scores, share(80, cards=2))
    assert (8, 9, 12) == answer(fuller, scores, share(cards=3), GpuRules(order=GpuOrder.BINPACK))
