"""Nodes ranked as HAMi ranks them: against its formula, and by the integers that are left of it."""

from fractions import Fraction

import msgspec
import pytest
from decision_support import container, machine, node, pod
from hami_slot_support import SIZES, Used, as_hami, hardware, state_of, usage
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slot_support import MIB, asks, holding, in_slots
from unit_support import DGX, KUBELET

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.share_annotations import NODE_POLICY
from topoalign.core.model.requests import PodRequest
from topoalign.core.scoring.scorers import by_place, hami_node_score, hami_order, node_policy, policy_of


def saying(policy: str, request: PodRequest) -> PodRequest:
    return msgspec.structs.replace(request, annotations={NODE_POLICY: policy})


def sums(used: Used) -> tuple[int, int, int]:
    """Slots, cores and MiB that are held."""
    held = [each for some in used.values() for each in some]
    return len(held), sum(cores for cores, _ in held), sum(memory for _, memory in held)


def full(used: Used) -> Fraction:
    """10 x (slots + cores + memory that are held, as parts of all): five GPUs with four slots and 100 cores."""
    slots, cores, memory = sums(used)
    return 10 * (Fraction(slots, 20) + Fraction(cores, 500) + Fraction(memory, sum(SIZES)))


@settings(max_examples=40)
@given(st.lists(usage(), min_size=1, max_size=14), st.sampled_from(["binpack", "spread"]))
def test_nodes_are_ranked_by_hamis_score_before_the_pod(several: list[Used], policy: str) -> None:
    """
    The best one has 10; no better one has less, the first nine are told apart, and those that hold the same
    never. Those that are as full by other parts HAMi's single precision may tell apart: 7 slots and 225 cores, 8 and 200.
    """
    assume(len({*map(full, several)}) == len({*map(sums, several)}))
    exact = [full(used) * (-1 if policy == "spread" else 1) for used in several]
    scores = [hami_node_score(state_of(used)) for used in several]

    better = [len({other for other in exact if other > each}) for each in exact]
    found = by_place([hami_order(policy, score) for score in scores])

    assert [max(1, 10 - ahead) for ahead in better] == found


def test_the_documented_nodes_are_ranked_so() -> None:
    """Example of HAMi's tests: 3 and 8."""
    plain = machine(gpus=(0, 1))
    sized = tuple(msgspec.structs.replace(each, memory=8_000 * MIB) for each in plain.gpus)
    empty = node(in_slots(msgspec.structs.replace(plain, gpus=sized), 10))
    scores = [hami_node_score(holding(empty, each)) for each in ((0, 25, 2_000), (1, 75, 6_000))]

    assert [pytest.approx(3.0), pytest.approx(8.0)] == scores
    assert ([9, 10], [10, 9]) == tuple(
        by_place([hami_order(policy, each) for each in scores]) for policy in ("", "spread")
    )


def test_gpus_that_are_not_in_slots_count_nothing() -> None:
    """One of ten slots, 40 of 100 cores and half of the memory of one GPU, of two in slots and six others."""
    half = DGX.gpus[0].memory
    assert half is not None
    used = holding(node(in_slots(DGX, 10, 2)), (0, 40, half // MIB // 2))

    assert pytest.approx(10 * (1 / 20 + 40 / 200 + 1 / 4)) == hami_node_score(used)
    assert 0.0 == hami_node_score(node(DGX))


def test_to_pods_without_gpus_all_nodes_are_equal() -> None:
    plain, share = (read_pod(saying("spread", pod(each)), as_hami(KUBELET)) for each in (container(nics=1), asks()))

    assert (None, "spread") == (policy_of(hardware(), plain), policy_of(hardware(), share))
    assert [10, 10] == by_place([hami_order(None, each) for each in (1.0, 2.0)])


@pytest.mark.parametrize(
    ("policy", "scores", "expected"),
    [
        ("binpack", [1.0, 2.0], [9, 10]),
        ("spread", [1.0, 2.0], [10, 9]),
        ("unknown", [1.0, 2.0], [9, 10]),
        ("spread", [0.0, 2.0, 0.0], [10, 9, 10]),
    ],
)
def test_every_policy_but_spread_takes_the_fullest_first(policy: str, scores: list[float], expected: list[int]) -> None:
    assert expected == by_place([hami_order(policy, each) for each in scores])


def test_a_pod_can_say_how_its_node_is_chosen() -> None:
    assert "spread" == node_policy({NODE_POLICY: "spread"})
    assert ("binpack", "spread") == (node_policy({}), node_policy({}, "spread"))
