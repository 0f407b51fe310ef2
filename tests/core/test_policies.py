"""Each topology policy by a small table of cases."""

import re
from pathlib import Path

import pytest

from topoalign import core
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode, Policy
from topoalign.core.policy import POLICIES
from topoalign.core.policy.topology_policy import MergeQuestion

MACHINE = 0b11
BOTH = [TopologyHint(0b01, True), TopologyHint(0b10, True), TopologyHint(0b11, False)]
FIRST = [TopologyHint(0b01, True), TopologyHint(0b11, False)]
SECOND = [TopologyHint(0b10, True), TopologyHint(0b11, False)]
WIDE = [TopologyHint(0b11, True)]
LATE = [TopologyHint(0b10, False), TopologyHint(0b11, False)]
ANY = [TopologyHint(None, True)]
NOWHERE = [TopologyHint(None, False)]


@pytest.mark.parametrize(
    ("policy", "lists", "affinity", "preferred", "admits"),
    [
        pytest.param("none", [SECOND], None, False, True, id="none does not look"),
        pytest.param("best-effort", [BOTH, BOTH], 0b01, True, True, id="the lowest of equals"),
        pytest.param("best-effort", [BOTH, SECOND], 0b10, True, True, id="where both are preferred"),
        pytest.param("best-effort", [FIRST, SECOND], 0b01, False, True, id="no common node, admitted all the same"),
        pytest.param("best-effort", [BOTH, WIDE], 0b11, False, True, id="as wide as the greediest needs"),
        pytest.param("best-effort", [BOTH, NOWHERE], 0b01, False, True, id="one resource cannot be met"),
        pytest.param("restricted", [BOTH, SECOND], 0b10, True, True, id="aligned as well as can be"),
        pytest.param("restricted", [FIRST, SECOND], 0b01, False, False, id="no common node"),
        pytest.param("restricted", [LATE], 0b10, False, False, id="not as narrow as it could be"),
        pytest.param("restricted", [WIDE, WIDE], 0b11, True, True, id="two nodes are fine if two are needed"),
        pytest.param("restricted", [BOTH, NOWHERE], 0b01, False, False, id="one cannot be met, refused"),
        pytest.param("single-numa-node", [BOTH, SECOND], 0b10, True, True, id="one node for all"),
        pytest.param("single-numa-node", [WIDE], None, False, False, id="two nodes are needed"),
        pytest.param("single-numa-node", [ANY], None, True, True, id="no opinion, the affinity is left open"),
        pytest.param("single-numa-node", [BOTH, NOWHERE], None, False, False, id="one cannot be met, none is left"),
    ],
)
def test_policy(
    policy: str, lists: list[list[TopologyHint]], affinity: int | None, preferred: bool, admits: bool
) -> None:
    topology_policy = POLICIES[Policy(policy)]

    merged = topology_policy.merge(MergeQuestion(lists, MACHINE))

    assert (TopologyHint(affinity, preferred), admits) == (merged, topology_policy.admits(merged))


@pytest.mark.parametrize(
    ("policy", "lists", "affinity", "preferred", "admits"),
    [
        pytest.param("none", [SECOND], None, False, True, id="none does not look"),
        pytest.param("best-effort", [BOTH, SECOND], 0b10, True, True, id="the node that has room for both"),
        pytest.param("best-effort", [FIRST, SECOND], 0b11, False, True, id="room for both, wider than either needs"),
        pytest.param("best-effort", [BOTH, NOWHERE], 0b01, False, True, id="one resource cannot be met"),
        pytest.param("restricted", [BOTH, WIDE], 0b11, True, True, id="as wide as the greediest needs"),
        pytest.param("restricted", [FIRST, SECOND], 0b11, False, False, id="wider than the greediest needs"),
        pytest.param("restricted", [LATE], 0b10, True, True, id="nothing narrower is free"),
        pytest.param("restricted", [BOTH, NOWHERE], 0b01, False, False, id="one cannot be met, refused"),
        pytest.param("restricted", [ANY], None, True, True, id="no opinion, the affinity is left open"),
        pytest.param("single-numa-node", [BOTH, SECOND], 0b10, True, True, id="one node for all"),
        pytest.param("single-numa-node", [BOTH, WIDE], None, False, False, id="two nodes are needed"),
        pytest.param("single-numa-node", [BOTH, NOWHERE], 0b01, False, False, id="one cannot be met, none is enough"),
    ],
)
def test_policy_in_mode_best(
    policy: str, lists: list[list[TopologyHint]], affinity: int | None, preferred: bool, admits: bool
) -> None:
    """All policies align to the narrowest nodes that have room for all; they differ in what they admit."""
    topology_policy = POLICIES[Policy(policy)]

    merged = topology_policy.merge(MergeQuestion(lists, MACHINE, mode=Mode.BEST))

    assert (TopologyHint(affinity, preferred), admits) == (merged, topology_policy.admits(merged))


def test_single_numa_node_leaves_the_affinity_of_a_one_node_machine_open() -> None:
    """
    The policy single-numa-node leaves the affinity open on a machine of one node. Its only node is the whole machine,
    so no node was singled out.
    """
    merged = POLICIES[Policy.SINGLE_NUMA_NODE].merge(MergeQuestion([[TopologyHint(0b1, True)]], 0b1))

    assert TopologyHint(None, True) == merged


@pytest.mark.parametrize(
    ("policy", "asks", "single_node"),
    [
        ("none", False, False),
        ("best-effort", True, False),
        ("restricted", True, False),
        ("single-numa-node", True, True),
    ],
)
def test_a_policy_tells_what_the_rest_has_to_know_of_it(policy: str, asks: bool, single_node: bool) -> None:
    """Under `none` no provider is asked for hints; `single-numa-node` merges hints for single nodes only."""
    told = POLICIES[Policy(policy)]

    assert (policy, asks, single_node) == (told.name, told.asks, told.single_node)


def test_every_policy_has_the_name_it_is_found_by() -> None:
    assert [policy.value for policy in Policy] == [POLICIES[policy].name for policy in Policy]


@pytest.mark.parametrize(
    ("policy", "affinity"),
    [("restricted", 0b1001), ("best-effort", 0b1001), ("single-numa-node", None)],
)
def test_distances_settle_equally_many_nodes_not_for_single_numa_node(policy: str, affinity: int | None) -> None:
    """
    Distances decide between equally many nodes, but not for single-numa-node. Nodes 0 and 3 are neighbours here, so
    they are taken before 0 and 1.
    """
    near = {(0, 3), (3, 0)}
    distances = {a: {b: 10 if a == b else 12 if (a, b) in near else 30 for b in range(4)} for a in range(4)}
    pairs = [TopologyHint(mask, True) for mask in (0b0011, 0b0101, 0b1001)]

    assert affinity == POLICIES[Policy(policy)].merge(MergeQuestion([pairs], 0b1111, distances)).affinity


def test_every_policy_is_in_the_table_under_its_name() -> None:
    """A request may name each, and what it names is what is asked."""

    assert {policy: policy.value for policy in Policy} == {policy: each.name for policy, each in POLICIES.items()}


def test_nothing_but_the_table_asks_which_policy_it_is() -> None:
    """The core asks a policy's attributes; only the table, and the default of the rules, name one."""
    found = {
        str(path.relative_to(Path(core.__file__).parent))
        for path in Path(core.__file__).parent.rglob("*.py")
        if re.search(r"\bPolicy\.[A-Z]", path.read_text())
    }

    assert {"policy/__init__.py", "model/requests.py"} == found
