"""The merge against the cross product that the kubelet walks through, and its rules one by one."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from merge_reference import cross_product, narrowest_room

from topoalign.core.model.hints import HintRule, ProviderHints, ResourceNeed, TopologyHint
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.bitmask import masks_by_size, node_mask
from topoalign.core.policy.merge.kubelet_merge import ANY, NO_AFFINITY, merge, offers_of_providers
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit

SPARSE = (0, 3, 8, 70)
A, B, C = (ResourceName(name) for name in "abc")


@st.composite
def lists_of_hints(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[TopologyHint]]]:
    nodes = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2), SPARSE]))
    beyond = 1 << 5
    masks = st.sampled_from([None, *masks_by_size(nodes), beyond | 1, beyond])
    hints = st.builds(TopologyHint, masks, st.booleans())
    return nodes, draw(st.lists(st.lists(hints, max_size=5), max_size=4))


@given(lists_of_hints(), st.data())
def test_merge_finds_what_the_cross_product_finds(
    given_lists: tuple[tuple[int, ...], list[list[TopologyHint]]], data: st.DataObject
) -> None:
    """Counting over supersets changes nothing, with sparse ids and with masks beyond the machine."""
    nodes, lists = given_lists
    numbers = st.integers(10, 14)
    distances = {a: {b: data.draw(numbers) for b in nodes} for a in nodes} if data.draw(st.booleans()) else None

    expected = cross_product(lists, node_mask(nodes), distances)

    assert expected == merge(lists, node_mask(nodes), distances)


@given(lists_of_hints(), st.data())
def test_the_narrowest_fit_is_found_among_all_sets_of_nodes(
    given_lists: tuple[tuple[int, ...], list[list[TopologyHint]]], data: st.DataObject
) -> None:
    """
    With hints beyond the machine, for which there is no room in it. A list is of hints for some nodes or of one for any, as
    providers give them.
    """
    nodes, drawn = given_lists
    lists = [[hint for hint in hints if hint.affinity is not None] or [*hints[:1], NO_AFFINITY][:1] for hints in drawn]
    numbers = st.integers(10, 14)
    distances = {a: {b: data.draw(numbers) for b in nodes} for a in nodes} if data.draw(st.booleans()) else None
    machine = node_mask(nodes)

    expected = narrowest_room(lists, machine, distances)

    assert expected == narrowest_fit(lists, machine, distances)


@settings(max_examples=60)
@given(lists_of_hints(), st.randoms(use_true_random=False))
def test_the_order_of_lists_and_hints_has_no_say(
    given_lists: tuple[tuple[int, ...], list[list[TopologyHint]]], random: Random
) -> None:
    nodes, lists = given_lists
    shuffled = [random.sample(hints, len(hints)) for hints in random.sample(lists, len(lists))]

    assert merge(lists, node_mask(nodes)) == merge(shuffled, node_mask(nodes))


def test_no_opinion_and_cannot_be_met_are_told_apart() -> None:
    """No answer, None and an empty list mean any node preferred, any node preferred, and any node not preferred."""
    rule = HintRule(nodes=0b11, needs=(ResourceNeed(1, {0b01: 1, 0b10: 1}),), least=1)
    answers: list[ProviderHints] = [{}, {A: None, B: ()}, {C: (TopologyHint(1, True),)}, {A: rule}]

    assert [(ANY,), (ANY,), (NO_AFFINITY,), (TopologyHint(1, True),), rule] == offers_of_providers(answers)


def test_without_opinions_the_whole_machine_is_preferred() -> None:
    assert TopologyHint(0b11, True) == merge([], 0b11)
    assert TopologyHint(0b11, True) == merge([[ANY], [ANY]], 0b11)


def test_a_wide_machine_costs_nothing_where_hints_are_narrow() -> None:
    """34 NUMA nodes are no reason to refuse as long as the lists have few nodes in common."""
    machine = node_mask(range(34))
    cpus = [TopologyHint(0b01, True), TopologyHint(0b10, True), TopologyHint(0b11, False)]

    assert TopologyHint(machine, False) == merge([[NO_AFFINITY], [ANY]], machine)
    assert TopologyHint(0b01, False) == merge([cpus, [NO_AFFINITY]], machine)
    assert TopologyHint(0b10, True) == merge([cpus, [TopologyHint(0b10, True)]], machine)
