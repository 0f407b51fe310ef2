"""Hints by rule: on few NUMA nodes they come to what their lists come to, and on 64 they come to something in time."""

import random
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest
from decision_support import GIB, admitted, container, machine, node, pod
from hypothesis import assume, example, given
from hypothesis import strategies as st
from merge_reference import cross_product, knapsack, narrowest_room

from topoalign.core.admission.admit import admit
from topoalign.core.hints.hint_rules import Supply, narrowest_hint
from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.model.topology.bitmask import Mask, masks_by_size, node_mask, nodes_of
from topoalign.core.numa_sets.search import MOST_STEPS, Choosing, NumaSearchBudget
from topoalign.core.numa_sets.subsets import TooManyNumaNodes, hints_of_rule
from topoalign.core.policy.merge.closest_numa import Distances
from topoalign.core.policy.merge.kubelet_merge import ANY, NO_AFFINITY, Offer, merge
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit
from topoalign.core.policy.single_numa_node import single


def all_hints(rule: HintRule, machine: Mask) -> list[TopologyHint]:
    """What a rule stands for: every set of nodes is looked at."""
    found = []
    for mask in masks_by_size(nodes_of(machine)):
        has = [sum(amount for near, amount in need.supply.items() if near & mask) for need in rule.needs]
        enough = not mask & ~rule.nodes and all(n >= need.amount for n, need in zip(has, rule.needs, strict=True))
        if enough or mask in rule.besides:
            found.append(TopologyHint(mask, mask.bit_count() == rule.least))
    return found


WIDE = node_mask(range(64))
LAST_NODE = HintRule(nodes=0b111, needs=(ResourceNeed(1, {0b100: 1}),), least=1)
"""Only node 2 will do, so that of two hints which overlap the higher is better."""


@st.composite
def rules(draw: st.DrawFn, nodes: int) -> HintRule:
    """Needs of what is near one node, of what is near several, of all that is near one; and masks besides."""
    inside = draw(st.lists(st.integers(0, nodes - 1), min_size=1, unique=True))
    masks = st.sets(st.sampled_from(inside), min_size=1).map(node_mask)
    needs = []
    for _ in range(draw(st.integers(1, 2))):
        supply = {1 << each: draw(st.integers(0, 4)) for each in inside}
        supply.update(draw(st.dictionaries(masks, st.integers(1, 2), max_size=2)))
        needs.append(
            ResourceNeed(draw(st.integers(0, max(1, sum(supply.values()) // draw(st.integers(1, 4))))), supply)
        )
    needs += [ResourceNeed(1, {mask: 1}) for mask in draw(st.lists(masks, max_size=1))]
    assume(any(need.amount for need in needs))
    anywhere = st.integers(1, (1 << nodes) - 1)
    besides = draw(
        st.one_of(st.just(()), st.sets(anywhere, min_size=1, max_size=2).map(lambda some: tuple(sorted(some))))
    )
    rule = HintRule(nodes=node_mask(inside), needs=tuple(needs), least=0, besides=besides)
    widths = [hint.affinity.bit_count() for hint in all_hints(rule, (1 << nodes) - 1) if hint.affinity is not None]
    assume(widths)
    least = min(widths) - draw(st.sampled_from([0, 0, 0, 1]))
    return HintRule(nodes=rule.nodes, needs=rule.needs, least=least, besides=besides)


@st.composite
def situations(draw: st.DrawFn, beyond: int = 0) -> tuple[list[Offer], Mask, Distances | None]:
    """Some offers, one of them a rule; so few of them on many nodes that every combination can be walked through."""
    nodes = draw(st.integers(1, 6))
    known = st.integers(1, (1 << nodes) - 1)
    masks = st.one_of(known, known.map(lambda mask: mask | beyond), st.just(beyond or 1))
    lists = st.lists(st.builds(TopologyHint, masks, st.booleans()), min_size=1, max_size=4)
    others = st.one_of(rules(nodes), lists, st.sampled_from([[ANY], [NO_AFFINITY]]))
    most = 3 if nodes <= 3 else 2 if nodes == 4 else 1
    offers = [draw(rules(nodes)), *draw(st.lists(others, max_size=most))]
    far = st.sampled_from([12, 16, 20, 32])
    rows = {a: {b: 10 if a == b else draw(far) for b in range(nodes)} for a in range(nodes)}
    return draw(st.permutations(offers)), (1 << nodes) - 1, draw(st.sampled_from([None, rows]))


def in_full(offers: Sequence[Offer]) -> list[Sequence[TopologyHint]]:
    return [hints_of_rule(offer) if isinstance(offer, HintRule) else offer for offer in offers]


@given(st.integers(1, 6).flatmap(rules))
def test_a_rule_stands_for_the_sets_of_nodes_that_meet_all_needs(rule: HintRule) -> None:
    assert all_hints(rule, 0b111111) == list(hints_of_rule(rule))


@given(situations(beyond=1 << 9))
def test_rules_merge_to_what_their_lists_merge_to(of: tuple[list[Offer], Mask, Distances | None]) -> None:
    """The same hint by counting over supersets and by walking through every combination."""
    offers, whole, distances = of

    expected = cross_product(in_full(offers), whole, distances)

    assert expected == merge(offers, whole, distances)
    assert expected == merge(in_full(offers), whole, distances)


@example(([LAST_NODE, [TopologyHint(0b011, True), TopologyHint(0b110, True)]], 0b111, None))
@given(situations())
def test_in_mode_best_rules_come_to_the_narrowest_set_with_room_for_all(
    of: tuple[list[Offer], Mask, Distances | None],
) -> None:
    offers, whole, distances = of

    expected = narrowest_room(in_full(offers), whole, distances)

    assert expected == narrowest_fit(offers, whole, distances)
    assert expected == narrowest_fit(in_full(offers), whole, distances)


@given(st.integers(1, 6).flatmap(rules), st.integers(0, 63), st.integers(0, 63) | st.just(-1))
def test_the_best_hint_of_a_rule_is_that_of_its_list(rule: HintRule, around: Mask, within: Mask) -> None:
    """Preferred, then narrow; with all nodes of one mask and none outside another, which may exclude each other."""
    masks = [(hint, hint.affinity) for hint in all_hints(rule, 0b111111) if hint.affinity is not None]
    fits = [(hint, mask) for hint, mask in masks if not around & ~mask and not mask & ~within]
    expected = min(fits, key=lambda each: (not each[0].preferred, each[1].bit_count(), each[1]), default=(None, 0))[0]

    assert expected == narrowest_hint(rule, around, within)
    assert expected == narrowest_hint(hints_of_rule(rule), around, within)


@given(st.integers(1, 6).flatmap(rules))
def test_the_preferred_single_nodes_of_a_rule_are_those_of_its_list(rule: HintRule) -> None:
    assert set(single(hints_of_rule(rule))) == set(single(rule))


@given(st.integers(1, 6).flatmap(rules), st.integers(0, 6), st.integers(0, 63))
def test_a_search_finds_all_sets_of_a_size_ascending(rule: HintRule, size: int, fixed: Mask) -> None:
    """Those that hold the fixed nodes, which need not be nodes of the rule; also where it meets the same needs again."""
    searched = Choosing(rule.nodes, rule.needs, NumaSearchBudget(), fixed=fixed)
    family = HintRule(nodes=rule.nodes | fixed, needs=rule.needs, least=0)
    every = [hint.affinity for hint in all_hints(family, 0b111111) if hint.affinity is not None]
    expected = sorted(mask for mask in every if not fixed & ~mask)

    assert [mask for mask in expected if mask.bit_count() == size] == list(searched.masks(size))
    assert min((mask.bit_count() for mask in expected), default=None) == searched.least_size()


def even(of_64: int) -> HintRule:
    """A resource of which every node has one, and so many are needed."""
    return HintRule(nodes=WIDE, needs=(ResourceNeed(of_64, {1 << each: 1 for each in range(64)}),), least=of_64)


@pytest.mark.parametrize("seed", range(12))
def test_on_64_even_nodes_the_merge_is_as_wide_as_the_greediest_and_lowest(seed: int) -> None:
    """The narrowest set with room for all is that of the greediest. Mode `kubelet` merges what all resources prefer."""
    chance = random.Random(seed)
    needed = [chance.randint(*chance.choice([(1, 8), (30, 64), (62, 64)])) for _ in range(8)]
    work = NumaSearchBudget()
    widest = max(needed)

    assert TopologyHint(node_mask(range(widest)), True) == narrowest_fit([even(each) for each in needed], WIDE)
    assert TopologyHint(node_mask(range(widest)), True) == merge([even(widest)] * 8, WIDE, None, work)
    assert not work.ended


def test_hints_of_many_nodes_that_do_not_agree_are_refused() -> None:
    """Mode `kubelet`: what the hints have in common is found up to 12 NUMA nodes; the kubelet itself would take hours."""
    with pytest.raises(TooManyNumaNodes, match="64 NUMA nodes take part"):
        merge([even(1), even(2)], WIDE)


def uneven(seed: int, share: float) -> list[HintRule]:
    """Eight resources of which each node has another amount; so much is needed that `share` of 64 nodes have it."""
    chance = random.Random(seed)
    made = []
    for _ in range(8):
        supply = {1 << each: chance.randint(100, 1000) for each in range(64)}
        wanted = Supply(WIDE, (ResourceNeed(int(sum(supply.values()) * share), supply),))
        made.append(HintRule(nodes=WIDE, needs=wanted.needs, least=wanted.least_size() or 0))
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.005, 0.03, 0.1])
def test_eight_uneven_resources_on_64_nodes_are_merged_within_the_limit(seed: int, share: float) -> None:
    offers, work = uneven(seed, share), NumaSearchBudget()

    best = narrowest_fit(offers, WIDE, None, work)

    assert not work.ended
    widest = max(rule.least for rule in offers)
    assert best.affinity is not None
    assert best.preferred == (best.affinity.bit_count() == widest)
    assert all(hints_of(rule, best.affinity) for rule in offers)


def hints_of(rule: HintRule, mask: Mask) -> list[TopologyHint]:
    """The rule's hint for this very mask, if it has one."""
    enough = all(sum(need.supply[1 << each] for each in nodes_of(mask)) >= need.amount for need in rule.needs)
    return [TopologyHint(mask, mask.bit_count() == rule.least)] if enough else []


@pytest.mark.parametrize("limit", [1_000, MOST_STEPS])
def test_a_knapsack_over_most_of_64_nodes_ends_at_the_limit_and_says_so(limit: int) -> None:
    """Whatever is looked for, no more steps are counted than the limit allows, and those of the one that was too many."""
    for look in (partial(merge, knapsack(), WIDE), partial(narrowest_fit, knapsack(), WIDE)):
        work = NumaSearchBudget(limit)
        with pytest.raises(TooMuchWork, match="limit on work"):
            look(None, work)
        assert work.ended
        assert -128 <= work.steps < 0


def test_the_closest_of_the_lowest_sets_of_many_nodes_is_taken() -> None:
    """Any 2 of 64 nodes would do. Nodes 0 and 40 are among the 64 lowest sets no more than 62 and 63 are; 2 and 5 are."""
    pairs = {(0, 40): 11, (62, 63): 11, (2, 5): 12}
    distances = {a: {b: 10 if a == b else pairs.get((min(a, b), max(a, b)), 20) for b in range(64)} for a in range(64)}

    assert TopologyHint(node_mask([2, 5]), True) == narrowest_fit([even(2)], WIDE, distances)
    assert TopologyHint(node_mask([0, 40]), True) == merge(
        [even(2)], WIDE, {**distances, 62: {**distances[62], 63: 20}}
    )


def test_node_ids_may_be_sparse_and_beyond_63() -> None:
    """Eleven nodes 0, 60, ..., 600: the two with the most GPUs left are taken."""
    near = [60 * each for each in range(11)]
    supply = {1 << each: 3 if each in (240, 540) else 1 for each in near}
    rule = HintRule(nodes=node_mask(near), needs=(ResourceNeed(6, supply),), least=2)

    assert TopologyHint(node_mask([240, 540]), True) == narrowest_fit([rule, [ANY]], node_mask(near))
    assert TopologyHint(node_mask([0, 240, 540]), False) == narrowest_fit(
        [rule, [TopologyHint(1, True)]], node_mask(near)
    )


@pytest.mark.parametrize("nodes", [9, 13, 64, 1_024])
def test_many_numa_nodes_are_ordinary(nodes: int) -> None:
    """Also as many as Linux can be built for. Half of the nodes are needed for their CPUs."""
    last = nodes - 1
    topology = machine(nodes=nodes, cores=1, threads=1, gpus=[last], nics=[], memory=8 * GIB)
    state = node(msgspec.structs.replace(topology, distances=None))
    asked = pod(container(gpus=1, cpus=nodes // 2, gib=4))

    got = admitted(admit(state, asked, AdmissionRules(policy=Policy.RESTRICTED)))["main"]

    assert (*range(nodes // 2 - 1), last) == got.affinity


def test_a_search_ends_with_the_step_that_is_one_too_many() -> None:
    """What is said of it then is said of this search and not of one that came out even."""
    work = NumaSearchBudget(3)
    work.step(2)
    work.step()

    assert not work.ended
    with pytest.raises(TooMuchWork):
        work.step()
    assert work.ended
