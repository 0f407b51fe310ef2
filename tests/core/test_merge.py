"""The merge against the cross product that the kubelet walks through, and its rules one by one."""

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.hints.enumeration import TooManyNumaNodes
from topoalign.core.hints.model import ProviderHints, TopologyHint
from topoalign.core.ids import ResourceName
from topoalign.core.policy.merge import ANY, NOWHERE, Distances, HintLists, hint_lists, merge
from topoalign.core.topology.bitmask import mask_of, masks_by_size, nodes_of

SPARSE = (0, 3, 8, 70)
A, B, C = (ResourceName(name) for name in "abc")


@st.composite
def lists_of_hints(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[TopologyHint]]]:
    nodes = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2), SPARSE]))
    beyond = 1 << 5
    masks = st.sampled_from([None, *masks_by_size(nodes), beyond | 1])
    hints = st.builds(TopologyHint, masks, st.booleans())
    return nodes, draw(st.lists(st.lists(hints, max_size=5), max_size=4))


def cross_product(lists: HintLists, machine: int, distances: Distances | None) -> TopologyHint:
    """One hint of every list at a time, as the rule is told."""
    greediest = max(
        (min((h.affinity.bit_count() for h in hints if h.affinity is not None), default=0) for hints in lists),
        default=0,
    )

    def key(mask: int) -> tuple[int, float, int]:
        inside = nodes_of(mask)
        far = sum(distances[a][b] for a in inside for b in inside) / len(inside) ** 2 if distances else 0.0
        return (len(inside), far, mask)

    preferred: list[int] = []
    others: list[int] = []
    for chosen in product(*lists):
        masks = [hint.affinity for hint in chosen if hint.affinity is not None]
        merged = machine
        for mask in masks:
            merged &= mask
        if merged:
            alike = len({*masks}) <= 1 and all(hint.preferred for hint in chosen)
            (preferred if alike else others).append(merged)
    if preferred:
        return TopologyHint(min(preferred, key=key), True)
    within = [mask for mask in others if mask.bit_count() <= greediest]
    if within:
        widest = max(mask.bit_count() for mask in within)
        return TopologyHint(min((mask for mask in within if mask.bit_count() == widest), key=key), False)
    return TopologyHint(min(others, key=key) if others else machine, False)


@settings(max_examples=400, deadline=None)
@given(lists_of_hints(), st.data())
def test_merge_finds_what_the_cross_product_finds(
    given_lists: tuple[tuple[int, ...], list[list[TopologyHint]]], data: st.DataObject
) -> None:
    """Folding sets and counting over supersets changes nothing, with sparse ids and with masks beyond the machine."""
    nodes, lists = given_lists
    numbers = st.integers(10, 14)
    distances = {a: {b: data.draw(numbers) for b in nodes} for a in nodes} if data.draw(st.booleans()) else None

    expected = cross_product(lists, mask_of(nodes), distances)

    assert expected == merge(lists, mask_of(nodes), distances)


@settings(max_examples=60, deadline=None)
@given(lists_of_hints(), st.randoms(use_true_random=False))
def test_the_order_of_lists_and_hints_has_no_say(
    given_lists: tuple[tuple[int, ...], list[list[TopologyHint]]], random: Random
) -> None:
    nodes, lists = given_lists
    shuffled = [random.sample(hints, len(hints)) for hints in random.sample(lists, len(lists))]

    assert merge(lists, mask_of(nodes)) == merge(shuffled, mask_of(nodes))


def test_no_opinion_and_cannot_be_met_are_told_apart() -> None:
    """No answer, None and an empty list mean any node preferred, any node preferred, and any node not preferred."""
    answers: list[ProviderHints] = [{}, {A: None, B: ()}, {C: (TopologyHint(1, True),)}]

    assert [(ANY,), (ANY,), (NOWHERE,), (TopologyHint(1, True),)] == hint_lists(answers)


def test_without_opinions_the_whole_machine_is_preferred() -> None:
    assert TopologyHint(0b11, True) == merge([], 0b11)
    assert TopologyHint(0b11, True) == merge([[ANY], [ANY]], 0b11)


def test_a_wide_machine_costs_nothing_where_hints_are_narrow() -> None:
    """34 NUMA nodes are no reason to refuse as long as the lists have few nodes in common."""
    machine = mask_of(range(34))
    cpus = [TopologyHint(0b01, True), TopologyHint(0b10, True), TopologyHint(0b11, False)]

    assert TopologyHint(machine, False) == merge([[NOWHERE], [ANY]], machine)
    assert TopologyHint(0b01, False) == merge([cpus, [NOWHERE]], machine)
    assert TopologyHint(0b10, True) == merge([cpus, [TopologyHint(0b10, True)]], machine)


def test_lists_that_are_wide_in_common_are_refused_instead_of_enumerated() -> None:
    machine = mask_of(range(34))

    with pytest.raises(TooManyNumaNodes):
        merge([[TopologyHint(machine, False)], [NOWHERE]], machine)
