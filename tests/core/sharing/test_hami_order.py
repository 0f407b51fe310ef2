"""In which order cards are tried, against upstream's comparisons, and how full cards and nodes are."""

from fractions import Fraction
from itertools import permutations

import hami_reference as reference
import pytest
from hami_support import POLICIES, cards, requests, usage
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.share_annotations import EQUAL_WEIGHTS, Weights, read_weights
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.sharing.hami.gpu_scores import ScoredGpu, hami_gpu_score, hami_gpus_score, order_of_trial

weights = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5))


@given(cards(), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.sampled_from(POLICIES), st.booleans())
def test_cards_are_tried_from_the_end_of_the_sorted_list(
    some: list[reference.Card], scores: list[int], policy: str, numa_bind: bool
) -> None:
    for card, score in zip(some, scores, strict=False):
        card.score = Fraction(score)
    expected = [card.uuid for card in reversed(reference.sorted_list(some, policy, numa_bind))]

    scored = [ScoredGpu(usage(card), float(card.score)) for card in some]

    assert expected == [card.device for card in order_of_trial(scored, policy, numa_bind)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_the_list_has_no_say(policy: str) -> None:
    some = [ScoredGpu(usage(reference.Card(uuid, index=index)), 1.0) for uuid, index in (("a", 1), ("b", 1), ("c", 0))]

    assert {("b", "a", "c")} == {
        tuple(card.device for card in order_of_trial(each, policy, bind))
        for each in permutations(some)
        for bind in (True, False)
    }


@given(cards(), st.lists(requests, max_size=2), weights)
def test_scores_are_those_of_the_formula(
    some: list[reference.Card], several: list[HamiRequest], weighted: tuple[int, int, int]
) -> None:
    for card in some:
        expected = reference.score(card, several, weighted)
        score = hami_gpu_score(usage(card), several, Weights(*weighted))

        assert float(expected) == pytest.approx(score, rel=1e-6)
    assert float(reference.node_score(some)) == pytest.approx(hami_gpus_score([usage(card) for card in some]), rel=1e-6)


def test_scores_are_as_exact_as_those_of_single_precision() -> None:
    """0.1 + 0.1 + 0.6 is less than 0.6 + 0.1 + 0.1 in single precision, and more in double precision."""
    first = usage(reference.Card("a", slots=10, used_slots=1, cores=100, used_cores=10, memory=1000, used_memory=600))
    second = usage(reference.Card("b", slots=10, used_slots=6, cores=100, used_cores=10, memory=1000, used_memory=100))

    assert (8.0, 8.000000953674316) == (hami_gpu_score(first, []), hami_gpu_score(second, []))


@pytest.mark.parametrize("text", ["slot=1,core=1,memory=3", " memory=3 , slot = 1,core=1"])
def test_weights_come_in_any_order(text: str) -> None:
    assert Weights(1, 1, 3) == read_weights(text)
    assert Weights(1, 1, 1) == EQUAL_WEIGHTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slot=1,core=1",
        "slot=1,core=1,memory=1,slot=1",
        "slot=1,core=1,core=1",
        "slot=0,core=0,memory=0",
        "slot=-1,core=1,memory=1",
        "slot=1,core=1,memory=1.5",
        "slot=1,core=1,disk=1",
        "slot=1,core=1,memory",
        "slot=1,core=1,memory=9223372036854775808",
    ],
)
def test_other_weights_are_refused(text: str) -> None:
    assert None is read_weights(text)
