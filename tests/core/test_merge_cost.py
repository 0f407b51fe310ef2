"""A prediction warns where the kubelet's own merge takes minutes, and where the kubelet picks by chance."""

from itertools import product
from math import prod
from pathlib import Path

import msgspec
import pytest
from decision_support import GIB, admitted, container, machine, node, pod, refused
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Decision
from topoalign.core.model.hints import HintRule, Hints, ResourceNeed, TopologyHint
from topoalign.core.model.ids import CPU, GPU, ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy, Scope
from topoalign.core.numa_sets.subsets import hints_of_rule
from topoalign.core.policy.merge.merge_time import MANY, duration, length, longest, slow_merge, warn_of_combinations

PAGES = ResourceName("hugepages-2Mi")
STRICT = [Policy.BEST_EFFORT, Policy.RESTRICTED]
hints = st.lists(
    st.tuples(st.none() | st.integers(1, 15), st.booleans()).map(lambda each: TopologyHint(*each)), max_size=5
)


def permutations(lists: list[list[TopologyHint]], policy: Policy) -> int:
    """How often the kubelet's loop goes round: it walks through the lists, which single-numa-node filters first."""
    if policy is Policy.SINGLE_NUMA_NODE:
        lists = [
            [hint for hint in each if hint.preferred and (hint.affinity is None or bin(hint.affinity).count("1") == 1)]
            for each in lists
        ]
    return sum(1 for _ in product(*lists))


@given(st.lists(st.none() | hints, max_size=4), st.sampled_from([*STRICT, Policy.SINGLE_NUMA_NODE]))
def test_the_combinations_are_those_that_the_kubelet_walks_through(
    given: list[list[TopologyHint] | None], policy: Policy
) -> None:
    as_merged = [[TopologyHint(None, True)] if each is None else each or [TopologyHint(None, False)] for each in given]
    asked: list[Hints] = [None if each is None else tuple(each) for each in given]

    assert permutations(as_merged, policy) == prod(length(each, policy) for each in asked)


@given(st.integers(1, 6), st.integers(1, 12), st.lists(st.integers(1, 63), max_size=2, unique=True))
def test_a_rule_counts_as_the_most_hints_that_it_can_stand_for(nodes: int, amount: int, besides: list[int]) -> None:
    """Of more than eight NUMA nodes hints are not listed, and are not listed to be counted."""
    supply = {1 << i: 2 for i in range(nodes)}
    rule = HintRule(nodes=2**nodes - 1, needs=(ResourceNeed(amount, supply),), least=1, besides=tuple(sorted(besides)))
    most = len(hints_of_rule(rule))

    assert most <= length(rule, Policy.RESTRICTED) <= longest(nodes, Policy.RESTRICTED) + len(besides)
    assert nodes == length(rule, Policy.SINGLE_NUMA_NODE)


def asking(state_nodes: int, policy: Policy, closest: bool = False, scope: Scope = Scope.CONTAINER) -> Decision:
    """One container asks for some of all, on a machine whose NUMA nodes each have a GPU, a NIC and hugepages."""
    hardware = machine(nodes=state_nodes, gpus=range(state_nodes), nics=range(state_nodes))
    hardware = msgspec.structs.replace(
        hardware, nodes=tuple(msgspec.structs.replace(each, hugepages={PAGES: GIB}) for each in hardware.nodes)
    )
    rules = AdmissionRules(
        mode=Mode.KUBELET, policy=policy, scope=scope, prefer_closest_numa_nodes=closest, reserved_cpus="0"
    )
    wanted = container("main", gpus=1, nics=1, cpus=2, gib=2, others={PAGES: GIB // 2})
    return admit(node(hardware), pod(wanted), rules)


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("closest", [False, True])
@pytest.mark.parametrize("scope", list(Scope))
def test_a_merge_that_takes_the_kubelet_days_is_a_note(policy: Policy, closest: bool, scope: Scope) -> None:
    """Five resources with 255 hints each are 1.1e12 combinations."""
    (note,) = asking(8, policy, closest, scope).explanation.notes

    assert note.startswith("for the pod " if scope is Scope.POD else "for container main ")
    assert "about 1.1e+12 combinations" in note and "255 of cpu" in note and "about 3 days" in note


@pytest.mark.parametrize(("nodes", "policy"), [(4, Policy.RESTRICTED), (8, Policy.SINGLE_NUMA_NODE), (8, Policy.NONE)])
def test_a_merge_that_is_done_at_once_is_none(nodes: int, policy: Policy) -> None:
    assert () == asking(nodes, policy).explanation.notes


def test_where_topoalign_decides_itself_nothing_is_said_of_the_kubelet() -> None:
    eight = machine(nodes=8, gpus=range(8), nics=range(8))
    rules = AdmissionRules(mode=Mode.BEST, policy=Policy.RESTRICTED)
    init, main = container("init", gpus=2), container("main", gpus=1, nics=1, cpus=1, gib=1)

    assert () == admit(node(eight), pod(main, init=[init]), rules).explanation.notes


def test_a_warning_begins_at_a_hundred_million_combinations() -> None:
    assert None is warn_of_combinations({GPU: MANY - 1})
    assert "100000000 of nvidia.com/gpu" in (warn_of_combinations({GPU: MANY, CPU: 1}) or "")
    assert "1 of cpu" not in (warn_of_combinations({GPU: MANY, CPU: 1}) or "")


def test_any_number_of_combinations_can_be_said() -> None:
    """100 resources on 64 NUMA nodes are more than a float holds."""
    rule = HintRule(nodes=2**64 - 1, needs=(ResourceNeed(1, {1: 1}),), least=1)
    many = {"device": {ResourceName(f"example.com/{i}"): rule for i in range(100)}}

    assert "about 1.0e+24 combinations" in (slow_merge(many, Policy.RESTRICTED, ContainerName("c")) or "")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (25.0, "25 seconds"),
        (119.9, "119 seconds"),
        (120.0, "2 minutes"),
        (7199.0, "119 minutes"),
        (7200.0, "2 hours"),
        (172_800.0, "2 days"),
        (63_072_000.0, "2 years"),
        (3.2e16, "1,014,713,343 years"),
    ],
)
def test_a_duration_is_said_in_the_largest_unit_that_it_fills_twice(seconds: float, said: str) -> None:
    assert said == duration(seconds)


KUBELET = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, cpu_manager="none", memory_manager="None")


@pytest.mark.parametrize(
    ("init", "sidecar", "app", "chance"),
    [(3, False, 2, True), (3, False, 3, False), (3, False, 4, False), (3, True, 1, False)],
)
def test_an_app_container_with_some_init_devices_gets_them_by_chance(
    init: int, sidecar: bool, app: int, chance: bool
) -> None:
    """
    An app container that takes some devices of an init container gets them by chance. All of them, or all and more, are
    certain; a sidecar gives up none.
    """
    first = container("init", gpus=init, sidecar=sidecar)
    decision = admit(node(machine()), pod(container("main", gpus=app), init=[first]), KUBELET)

    notes = decision.explanation.notes
    assert chance == (app == len(admitted(decision)["main"].devices[GPU]) and bool(notes))
    if chance:
        assert notes[0].startswith("container main takes over 2 of the 3 nvidia.com/gpu of init containers")
        assert "at random" in notes[0]


def test_a_refusal_that_follows_from_such_a_choice_says_so_as_well() -> None:
    """What the second app container can have depends on which device the first one took over."""
    mains = container("one", gpus=1), container("two", gpus=4)
    decision = refused(admit(node(machine()), pod(*mains, init=[container("init", gpus=2)]), KUBELET))

    assert "two" == decision.container
    assert decision.explanation.notes[0].startswith("container one takes over 1 of the 2")


def test_published_cases_that_the_kubelet_picks_by_chance_have_the_note(vectors: Path) -> None:
    """
    The published cases in which the kubelet picks by chance are those with the note. A case is not compared by chance
    where the devices differ in the end; a note may be given for less.
    """
    from topoalign.tools.conformance.kubelet_files import FilesCase, decided

    cases = [
        msgspec.json.decode(line, type=FilesCase)
        for name in ("gone", "ended")
        for line in (vectors / f"kubelet_files/{name}.jsonl").read_bytes().splitlines()
    ]
    noted = {case.id for case in cases if any("at random" in note for note in decided(case).explanation.notes)}

    assert {case.id for case in cases if case.expect.by_chance} == noted & {c.id for c in cases if c.expect.admit}
