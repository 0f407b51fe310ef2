"""Where the kubelet picks devices of init containers at random, the more likely decision is predicted."""

from itertools import combinations
from math import isclose

import pytest
from decision_support import container, machine, node, pod, refused
from hypothesis import example, given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.admission.by_chance import MOST_RUNS, Pick, decide_most_likely, picks_of
from topoalign.core.model.decisions import Admission, Decision, Explanation, Refusal
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, Policy, Scope

RESTRICTED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="none", memory_manager="None")
SIX = machine(gpus=(0, 0, 0, 1, 1, 1))
FITS = Admission(allocations=(), explanation=Explanation())
NOTHING = frozenset[DeviceID]()


def misfit(code: str = "Code") -> Refusal:
    return Refusal(
        reason="r", code=code, finding="finding", remedy="", container=None, provider=None, explanation=Explanation()
    )


@given(nodes=st.lists(st.integers(0, 3), min_size=2, max_size=7), data=st.data())
def test_picks_that_differ_in_numa_nodes_have_the_chance_of_all_their_ways(
    nodes: list[int], data: st.DataObject
) -> None:
    amount = data.draw(st.integers(1, len(nodes) - 1))
    devices = machine(nodes=4, gpus=nodes).devices[GPU]
    ways = [tuple(sorted(nodes[i] for i in each)) for each in combinations(range(len(nodes)), amount)]
    picks = picks_of(devices, [*devices], amount)
    found = {tuple(sorted(nodes[devices.places[device]] for device in pick.devices)): pick.chance for pick in picks}

    assert len(found) == len(picks) == len(set(ways))
    assert all(isclose(ways.count(each) / len(ways), chance) for each, chance in found.items())
    assert frozenset([*devices][:amount]) == picks[0].devices


def test_a_pod_that_most_picks_refuse_is_refused_with_the_other_chance() -> None:
    """
    The first app container takes over 4 of 6 GPUs, and the second one the 2 that are left: these are of one NUMA node in
    6 of 15 cases, also in that of the lowest GPUs.
    """
    mains = container("one", gpus=4), container("two", gpus=2)
    decision = refused(admit(node(SIX), pod(*mains, init=[container("i", gpus=6)]), RESTRICTED, explain=True))

    assert ("TopologyAffinityError", "two") == (decision.reason, decision.container)
    assert "with about 40 % of the picks the kubelet admits the pod" == decision.explanation.notes[-1]


@pytest.mark.parametrize(
    ("scope", "policy", "app"),
    [
        (Scope.POD, Policy.RESTRICTED, "main"),
        (Scope.CONTAINER, Policy.NONE, "main"),
        (Scope.CONTAINER, Policy.BEST_EFFORT, ""),
    ],
)
def test_picks_that_bear_on_no_later_alignment_are_not_tried(scope: Scope, policy: Policy, app: str) -> None:
    rules = AdmissionRules(mode=Mode.KUBELET, policy=policy, scope=scope, cpu_manager="none", memory_manager="None")
    mains = [container(name, gpus=1) for name in ("one", app) if name]
    decision = admit(node(SIX), pod(*mains, init=[container("i", gpus=5)]), rules, explain=True)

    assert any("at random" in note for note in decision.explanation.notes)
    assert not any("% of the picks" in note for note in decision.explanation.notes)


@example(chances=[6, 2, 9, 9, 7, 7], verdicts=[True, False, False, False, True, True])
@given(chances=st.lists(st.integers(1, 9), min_size=1, max_size=6), verdicts=st.lists(st.booleans(), min_size=6))
def test_the_more_likely_decision_is_the_answer(chances: list[int], verdicts: list[bool]) -> None:
    """One random pick: the sums of the chances of both verdicts are compared."""
    picks = [Pick(each / sum(chances), NOTHING) for each in chances]

    def run(taken: tuple[int, ...]) -> tuple[Decision, list[list[Pick]]]:
        return (FITS if verdicts[taken[0] if taken else 0] else misfit()), [picks]

    admits = sum(chance for chance, fits in zip(chances, verdicts, strict=False) if fits)
    decision = decide_most_likely(run, explain=True)

    assert isinstance(decision, Admission) == isinstance(decide_most_likely(run, explain=False), Admission)
    assert (2 * admits >= sum(chances)) == isinstance(decision, Admission)
    assert (0 < admits < sum(chances)) == bool(decision.explanation.notes)


def test_the_number_of_decisions_is_bounded_and_the_note_says_so() -> None:
    runs = 0

    def run(taken: tuple[int, ...]) -> tuple[Decision, list[list[Pick]]]:
        nonlocal runs
        runs += 1
        return (FITS if runs % 2 else misfit()), [[Pick(0.25, NOTHING)] * 4] * 5

    decision = decide_most_likely(run, explain=True)

    assert MOST_RUNS == runs
    assert decision.explanation.notes[0].startswith("with about 50 % of the 64 most likely picks the kubelet refuses")


def test_picks_that_cannot_change_the_answer_are_tried_for_the_note_alone() -> None:
    """The scheduler's filter needs no note on the other decision: it stops once one of them has more than half."""
    runs: list[tuple[int, ...]] = []

    def run(taken: tuple[int, ...]) -> tuple[Decision, list[list[Pick]]]:
        runs.append(taken)
        return (FITS if taken else misfit()), [[Pick(0.1, NOTHING), Pick(0.6, NOTHING), Pick(0.3, NOTHING)]]

    decision = decide_most_likely(run, explain=False)

    assert isinstance(decision, Admission)
    assert [(), (1,)] == runs
    assert () == decision.explanation.notes
