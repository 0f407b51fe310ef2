"""Which cards are connected best, against all combinations, and what links are worth."""

import hami_reference as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.sharing.hami import gpu_links
from topoalign.core.sharing.hami.gpu_links import link_score, pick_best_connected
from topoalign.core.sharing.slots_as_hami import scores_of_links
from topoalign.machines.catalogue.systems import dgx1_volta
from topoalign.tools.conformance.hami_decision_cases import Gpu, LinkExpected, LinkInput
from topoalign.tools.conformance.hami_decisions import gpu_pair_score

CARDS = "abcdefg"
tables = st.dictionaries(
    st.sampled_from(CARDS),
    st.dictionaries(st.sampled_from(CARDS), st.sampled_from([-5, -1, 0, 1, 10, 100, 200])),
    max_size=len(CARDS),
)


@given(st.permutations(CARDS), st.integers(1, 7), st.integers(0, 3), tables)
def test_the_best_set_of_all_is_picked(
    order: list[str], count: int, again: int, scores: dict[str, dict[str, int]]
) -> None:
    """With scores below zero, different in both directions or missing, and with cards that come twice, as instances do."""
    cards = [*order, *order[:again]]
    given_cards = [(uuid, position, 0) for position, uuid in enumerate(cards)]
    expected = tuple(position for _, position, _ in reference.picked(given_cards, count, scores))

    assert expected == pick_best_connected(cards, count, scores)


def test_the_example_of_six_cards() -> None:
    """Walked from f to a: f and c, f and a are linked; the third of three is the first that ties."""
    scores = {a: {b: 100 if {a, b} in ({"a", "f"}, {"c", "f"}) else 1 for b in "abcdef" if b != a} for a in "abcdef"}

    assert ("f", "c", "a") == tuple("fedcba"[position] for position in pick_best_connected("fedcba", 3, scores))


@pytest.mark.parametrize(("cards", "count", "score"), [(16, 8, 1800), (32, 8, 1800), (56, 3, 0)])
def test_of_equal_cards_the_first_are_picked_at_once(cards: int, count: int, score: int) -> None:
    """GPUs at NVSwitches, and MIG instances, which have no links: 12,870 sets took 30 ms, and more were refused."""
    names = [str(number) for number in range(cards)]

    assert tuple(range(count)) == pick_best_connected(names, count, {a: dict.fromkeys(names, score) for a in names})


def test_more_sets_than_are_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {a: {b: abs(ord(a) - ord(b)) for b in CARDS} for a in CARDS}
    monkeypatch.setattr(gpu_links, "MOST_SETS", 5)

    with pytest.raises(TooMuchWork):
        pick_best_connected(CARDS, 3, scores)


@pytest.mark.parametrize(
    ("link", "worth"),
    [
        (PcieClass.SYS, 10),
        (PcieClass.NODE, 20),
        (PcieClass.PHB, 30),
        (PcieClass.PXB, 40),
        (PcieClass.PIX, 50),
        (PcieClass.PSB, 60),
        (1, 100),
        (18, 1800),
        (19, 0),
        (0, 0),
    ],
)
def test_what_a_link_is_worth(link: PcieClass | int, worth: int) -> None:
    assert worth == link_score(link)


def test_links_of_a_pair_add_up() -> None:
    """Of a DGX-1 GPU-0 and GPU-1 are below one PCIe switch with one NVLink, GPU-0 and GPU-3 on one socket with two."""
    scores = scores_of_links(dgx1_volta())["GPU-0"]

    assert (150, 230) == (scores["GPU-1"], scores["GPU-3"])


def test_a_pair_that_counts_its_links_differently_is_worth_nothing() -> None:
    cards = [
        Gpu("a", 0, {1: [{"pcie": "CrossCPU"}, {"nvlinks": 4}], 2: [{"nvlinks": 4}]}),
        Gpu("b", 1, {0: [{"pcie": "CrossCPU"}]}),
        Gpu("c", 2, {0: [{"nvlinks": 4}]}),
    ]

    first = gpu_pair_score(LinkInput(cards), LinkExpected([])).scores[0]

    assert {"b": 0, "c": 400} == first.score
