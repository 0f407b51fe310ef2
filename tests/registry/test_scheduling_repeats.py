"""A pod that no node takes is asked about again and again: the same answer is not made a second time."""

import pytest
from decision_support import container, machine, pod
from msgspec import Raw
from scheduling_support import FULL
from view_support import NODE, RULES, OneNode, Says, asked

from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.extender import extender_answers
from topoalign.registry.scheduling.extender.arguments import ExtenderCall
from topoalign.registry.scheduling.scheduling_api import Filtered

OTHER = NodeName("node-2")
ONE, TWO = (asked(pod(container("main", gpus=5), name=f"p{number}")) for number in (1, 2))
"""Pods that ask for more than a node has on one socket."""


@pytest.fixture
def world() -> OneNode:
    world = OneNode()
    for says in (world.says, Says(OTHER, machine(), RULES)):
        world.tell(says.all())
    return world


def test_pods_that_ask_for_the_same_get_the_same_refusals(world: OneNode) -> None:
    """In whatever order the scheduler names the nodes; who tells of it is told each pod."""
    first = world.scheduler.filter(ONE, (NODE, OTHER))

    assert first is world.scheduler.filter(TWO, (OTHER, NODE))
    assert {NODE: "NotEnoughDevices", OTHER: "NotEnoughDevices"} == {
        node: each.code for node, each in first.refused.items()
    }
    assert [(each.uid, {"NotEnoughDevices (never fits)": 2}) for each in (ONE, TWO)] == world.refused


@pytest.mark.parametrize("nodes", [(NODE,), (NODE, NODE), (NODE, NodeName("new")), (NODE, OTHER, OTHER)])
def test_other_nodes_get_an_answer_of_their_own(world: OneNode, nodes: tuple[NodeName, ...]) -> None:
    world.scheduler.filter(ONE, (NODE, OTHER))

    assert {*nodes} == world.scheduler.filter(ONE, nodes).refused.keys()


def test_a_node_that_changes_is_judged_anew(world: OneNode) -> None:
    world.tell(world.says.admit(pod(container("main", gpus=4)), "a"))
    four = asked(pod(container("main", gpus=8)))
    before = world.scheduler.filter(four, (NODE,))
    world.cluster.answers(NODE, False)

    assert ("NotEnoughDevices", "NodeStale") == tuple(
        each.refused[NODE].code for each in (before, world.scheduler.filter(four, (NODE,)))
    )


def test_what_is_a_pods_alone_is_answered_to_it_alone(world: OneNode) -> None:
    """Its gang is planned to one node: all others say so, and not to the next pod."""
    world.planned[ONE.uid] = NODE
    codes = [
        [world.scheduler.filter(each, (NODE, OTHER)).refused[node].code for node in (NODE, OTHER)]
        for each in (TWO, ONE, TWO)
    ]

    assert [["NotEnoughDevices"] * 2, ["NotEnoughDevices", "PlannedElsewhere"], ["NotEnoughDevices"] * 2] == codes


def test_an_answer_is_rendered_once_for_each_form_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for each answer: an equal one is another one."""
    rendered: list[tuple[bool, tuple[int, int]]] = []
    render = extender_answers.filter_answer

    def counted(asked: ExtenderCall, filtered: Filtered, kubernetes: tuple[int, int]) -> bytes:
        rendered.append((asked.whole is None, kubernetes))
        return render(asked, filtered, kubernetes)

    monkeypatch.setattr(extender_answers, "filter_answer", counted)
    old, new = (1, 36), (1, 38)
    one, another = (Filtered(passed=(), refused={NODE: FULL}) for _ in range(2))
    named, whole = ExtenderCall(pod=b"", nodes=(NODE,)), ExtenderCall(pod=b"", nodes=(NODE,), whole={NODE: Raw(b"{}")})
    refusals = extender_answers.RenderedRefusals()
    calls = [(named, one, old), (named, one, old), (named, another, old), (named, one, new), (whole, one, new)]
    found = [refusals.answer(*call) for call in calls]

    assert [(True, old), (True, old), (True, new), (False, new)] == rendered
    assert found == [render(*call) for call in calls]
    assert found[0] is found[1]
