"""Which nodes are offered to pods at all, and with which code the others refuse every pod."""

from collections.abc import Iterator

import msgspec
import pytest
from decision_support import container, machine, pod
from view_support import NODE, RULES, SETTLED, OneNode, Says, tell_all

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.ids import NodeName


@pytest.fixture
def world() -> Iterator[OneNode]:
    world = OneNode()
    tell_all(world.cluster, world.says.all())
    yield world


def test_a_node_is_offered_once_all_of_it_is_known() -> None:
    world = OneNode()
    before, codes = world.code(), []
    for event in world.says.all():
        tell_all(world.cluster, [event])
        codes.append(world.code())

    assert ("UnknownNode", ["NodeNotWhole"] * 2 + ["KubeletUnknown", ""]) == (before, codes)


def test_a_node_that_does_not_answer_is_not_offered(world: OneNode) -> None:
    answering = world.code()
    world.cluster.answers(NODE, False)
    away = world.code()
    world.cluster.answers(NODE, True)

    assert ("", "NodeStale", "") == (answering, away, world.code())


def test_a_node_with_missing_events_is_not_offered_until_healed(world: OneNode) -> None:
    """No fact of the node tells of it: the client does."""
    offered = world.code()
    world.unsettled = Unsettled(frozenset({NODE}), frozenset())
    missing = world.code()
    world.unsettled = SETTLED

    assert ("", "NodeNotWhole", "") == (offered, missing, world.code())


def test_a_node_with_a_twin_is_not_offered_until_one_is_alone(world: OneNode) -> None:
    """C43: no state of two machines under one name is mixed into an offer."""
    offered = world.code()
    world.unsettled = Unsettled(frozenset(), frozenset({NODE}))
    twin = world.code()
    world.unsettled = SETTLED

    assert ("", "DuplicateAgent", "") == (offered, twin, world.code())


def test_a_node_whose_kubelet_tells_no_rules_is_not_offered(world: OneNode) -> None:
    """Its own settings stand for the kubelet's configuration then, and a guess is no rule."""
    rules = to_kubelet_rules(RULES, "not read in time")
    tell_all(world.cluster, [world.says.usage(rules=rules)])
    guessed = world.code()
    tell_all(world.cluster, [world.says.usage()])
    known = world.code()
    tell_all(world.cluster, [world.says.usage(rules=msgspec.structs.replace(rules, unknown="", policy="later"))])

    assert ("KubeletUnknown", "", "KubeletUnknown") == (guessed, known, world.code())


def test_a_kubelet_that_could_not_start_by_its_rules_is_not_offered() -> None:
    world = OneNode(msgspec.structs.replace(RULES, max_allowable_numa_nodes=2))
    tell_all(world.cluster, world.says.all())

    assert "KubeletUnknown" == world.code()


def test_a_deleted_node_is_offered_when_there_is_one_again(world: OneNode) -> None:
    """Its agent may go on speaking for a while."""
    world.view.label(NODE, {})
    world.view.forget(NODE)
    deleted = world.code()
    tell_all(world.cluster, [world.says.snapshot()])
    speaking = world.code()
    world.view.label(NODE, {})

    assert ("UnknownNode", "UnknownNode", "") == (deleted, speaking, world.code())


def test_a_node_that_the_registry_forgets_is_unknown(world: OneNode) -> None:
    offered = world.code()
    world.cluster.forget(NODE)
    gone = world.code()
    other = Says("node-0", machine(gpus=()), RULES)
    tell_all(world.cluster, other.all())
    tell_all(world.cluster, world.says.all())

    assert ("", "UnknownNode", "") == (offered, gone, world.code())
    assert "UnknownResource" == world.code(NodeName("node-0"))


def test_devices_that_only_the_kubelet_knows_are_not_predicted(world: OneNode) -> None:
    """Its checkpoint has GPUs of a plugin, and discovery sees none."""
    blind = Says("node-2", machine(gpus=()), RULES)
    tell_all(world.cluster, blind.all())
    none = world.code(NodeName("node-2"))
    tell_all(world.cluster, [blind.usage(registered=("nvidia.com/gpu",))])

    assert ("UnknownResource", "DevicesUnknown") == (none, world.code(NodeName("node-2")))


def test_what_a_node_has_more_of_than_before_is_told() -> None:
    """A pod's end is shown in Kubernetes before its kubelet has given back what it had: then pods that wait are woken."""
    one = OneNode()
    found = []
    for events in (
        one.says.all(),
        one.says.admit(pod(container("main", gpus=2)), "u"),
        [one.says.usage()],
        one.says.end("u"),
        [one.says.usage()],
    ):
        one.tell(events)
        one.view.renew()
        found.append([*one.offered])
        one.offered.clear()

    assert [[NODE], [], [], [NODE], []] == found
