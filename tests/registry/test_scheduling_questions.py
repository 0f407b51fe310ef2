"""Nodes that are not there yet, victims, and scores."""

from collections.abc import Mapping
from random import Random

import msgspec
import pytest
from decision_support import container, machine, pod
from faults_support import THOROUGH
from view_support import NODE, RULES, OneNode, Says, asked, scheduler_of, some_request, some_says, tell_all

from topoalign.core.admission.prediction import NodeKind
from topoalign.core.demand.node_filters import Constraints
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.ids import Namespace, NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, PodClass, empty
from topoalign.registry.scheduling.filter.node_templates import INSTANCE_TYPE, MACHINE, kinds_by_label
from topoalign.registry.scheduling.scheduling_api import Filtered, PodToSchedule, Victims

SEEDS = 600 if THOROUGH else 60
TWO, FIVE, NINE = (asked(pod(container("main", gpus=gpus), name=f"p{gpus}")) for gpus in (2, 5, 9))
NEW = NodeName("new")

pytestmark = pytest.mark.anyio


@pytest.fixture
def world() -> OneNode:
    world = OneNode()
    world.tell(world.says.all())
    return world


def code(filtered: Filtered, node: NodeName = NEW) -> str:
    """Of the node's refusal; empty: it would admit the pod."""
    return filtered.refused[node].code if node in filtered.refused else ""


def test_an_unknown_node_is_refused_and_others_are_not(world: OneNode) -> None:
    filtered = world.scheduler.filter(TWO, (NEW, NODE), {})

    assert ((NODE,), "UnknownNode") == (filtered.passed, code(filtered))


def test_a_new_node_is_judged_as_an_empty_sibling(world: OneNode) -> None:
    """By its instance type, whatever runs on the sibling now."""
    world.view.label(NODE, {INSTANCE_TYPE: "gpu4"})
    world.tell(world.says.admit(pod(container("main", gpus=4)), "a"))
    labels = {NEW: {INSTANCE_TYPE: "gpu4"}, NodeName("other"): {INSTANCE_TYPE: "gpu8"}}
    two, five = (world.scheduler.filter(each, (NODE, *labels), labels) for each in (TWO, FIVE))

    assert [("NotEnoughDevices", "", "UnknownNode")] == [tuple(code(two, each) for each in (NODE, *labels))]
    assert "NotEnoughDevices" == code(five)


def test_a_new_node_is_judged_by_the_machine_that_it_is_said_to_be(world: OneNode) -> None:
    """One of the catalogue, under the rules of a kubelet without configuration; before that, one of another node."""
    labels = {NEW: {MACHINE: "dgx-a100", INSTANCE_TYPE: "gpu"}}
    world.view.label(NODE, {INSTANCE_TYPE: "gpu"})
    of_catalogue = [code(world.scheduler.filter(each, (NEW,), labels)) for each in (FIVE, NINE)]
    world.view.label(NODE, {MACHINE: "dgx-a100"})
    of_node = [code(world.scheduler.filter(each, (NEW,), labels)) for each in (TWO, FIVE)]

    assert [["", "NotEnoughDevices"]] * 2 == [of_catalogue, of_node]


def test_alike_new_nodes_are_judged_once(world: OneNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision takes a millisecond, and so does a look at the labels of all nodes: a caller may name thousands."""
    judged, looked = list[NodeKind](), list[ClusterView]()

    def judge(verdicts: DecisionCache, request: PodClass, kind: NodeKind) -> str:
        judged.append(kind)
        return ""

    def look(view: ClusterView) -> dict[tuple[str, str], NodeKind]:
        looked.append(view)
        return kinds_by_label(view)

    monkeypatch.setattr(DecisionCache, "judge_empty", judge)
    monkeypatch.setattr("topoalign.registry.scheduling.filter.node_templates.kinds_by_label", look)
    world.view.label(NODE, {INSTANCE_TYPE: "gpu4"})
    labels = {NodeName(f"new-{number}"): {INSTANCE_TYPE: "gpu4", MACHINE: f"{number}"} for number in range(100)}
    world.scheduler.filter(TWO, tuple(labels))
    by_names_alone = len(looked)
    filtered = world.scheduler.filter(TWO, tuple(labels), labels)

    assert 0 == by_names_alone
    assert (100, 1, 1) == (len(filtered.passed), len(judged), len(looked))


def test_victims_help_where_amounts_are_what_is_lacking(world: OneNode) -> None:
    world.tell(world.says.admit(pod(container("main", gpus=4)), "a"))
    short = world.scheduler.filter(TWO, (NODE,)).refused[NODE]
    unlisted = asked(pod(container("main", nics=1)))
    without_nics = Says("bare", machine(nics=()), RULES)
    world.tell(without_nics.all())
    never = world.scheduler.filter(unlisted, (NodeName("bare"),)).refused[NodeName("bare")]
    world.cluster.answers(NODE, False)
    away = world.scheduler.filter(TWO, (NODE,)).refused[NODE]

    assert [True, False, False] == [each.helped_by_victims for each in (short, never, away)]


def test_a_refusal_says_where_the_end_of_pods_would_not_help(world: OneNode) -> None:
    """A node has four GPUs, and a pod holds two of them; then two are unhealthy."""
    world.tell(world.says.admit(pod(container("main", gpus=2)), "a"))
    three = asked(pod(container("main", gpus=3), name="p3"))
    before = [world.scheduler.filter(each, (NODE,)).refused[NODE] for each in (three, FIVE)]
    world.says.ill = frozenset(("GPU-0", "GPU-1"))
    world.tell([world.says.health()])
    after = [world.scheduler.filter(each, (NODE,)).refused[NODE] for each in (three, FIVE)]

    assert [None, Resolvability.NEVER] == [each.resolvability for each in before]
    assert [Resolvability.UNHEALTHY, Resolvability.NEVER] == [each.resolvability for each in after]
    assert [True, False, False, False] == [each.helped_by_victims for each in (*before, *after)]
    assert ["NotEnoughDevices (unhealthy devices)", "NotEnoughDevices (never fits)"] == [each.label for each in after]


def test_that_a_pod_never_fits_is_found_once_for_all_nodes_of_a_kind(
    world: OneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision takes a millisecond: a filter has it for thousands of nodes."""
    judged = list[NodeKind]()

    def judge(kind: NodeKind) -> NodeState:
        judged.append(kind)
        return empty(kind)

    monkeypatch.setattr("topoalign.registry.scheduling.filter.decision_cache.empty", judge)
    nodes = [Says(f"n{number}", machine(), RULES) for number in range(20)]
    for says in nodes:
        world.tell(says.all())
    filtered = world.scheduler.filter(FIVE, [says.node for says in nodes])

    assert ({Resolvability.NEVER}, 20, 1) == (
        {each.resolvability for each in filtered.refused.values()},
        len(filtered.refused),
        len(judged),
    )


async def test_nodes_that_are_not_offered_are_left_out_of_a_preemption(world: OneNode) -> None:
    world.tell(world.says.admit(pod(container("main", gpus=4)), "a"))
    victims = {each: Victims(uids=("a",)) for each in (NODE, NEW)}
    helped = await world.scheduler.preempt(TWO, victims)
    world.cluster.answers(NODE, False)

    assert ([NODE], {}) == (list(helped), await world.scheduler.preempt(TWO, victims))


async def test_victims_that_a_node_knows_by_their_names_are_found(world: OneNode) -> None:
    """Where no checkpoint could be read, the record has the names of pods alone."""
    world.view.expect(NODE, asked(pod(container("main", gpus=4), name="a"), "uid-a"))
    world.tell(world.says.admit(pod(container("main", gpus=4), name="a"), ""))
    world.says.entries = ()
    world.tell([world.says.usage()])

    assert [NODE] == list(await world.scheduler.preempt(TWO, {NODE: Victims(uids=("uid-a",))}))
    assert {} == await world.scheduler.preempt(TWO, {NODE: Victims(uids=("uid-b",))})


def member(
    name: str, *, gpus: int = 2, namespace: str = "ml", gang: str = "g", labels: Mapping[str, str] = {}
) -> PodToSchedule:
    """A pod of a gang, for nodes with these labels."""
    request = pod(container("main", gpus=gpus), name=name)
    request = msgspec.structs.replace(request, namespace=Namespace(namespace), annotations={GANG: gang, GANG_SIZE: "2"})
    return PodToSchedule(uid=f"uid-{name}", request=request, constraints=Constraints(labels=labels))


@pytest.mark.parametrize(
    ("other", "nodes"),
    [
        (member("b"), 2),
        (member("b", labels={"pool": "b"}), 3),
        (member("b", gpus=1), 3),
        (member("b", namespace="other"), 3),
        (member("b", gang="h"), 3),
    ],
    ids=["alike", "node selector", "request", "namespace", "gang"],
)
async def test_only_pods_of_a_gang_that_are_alike_share_the_nodes_of_a_filter(
    world: OneNode, other: PodToSchedule, nodes: int
) -> None:
    """The scheduler has left out a node for the one that it asked about."""
    names = [NODE, *map(NodeName, ("node-2", "node-3"))]
    for name in names[1:]:
        world.tell(Says(name, machine(), RULES).all())
    world.scheduler.filter(member("a"), names[:2])

    assert names[:nodes] == sorted(await world.scheduler.best(other))


async def test_the_node_that_the_scheduler_has_chosen_is_among_those_of_a_gang(world: OneNode) -> None:
    """S14. It asked about that node alone, or another registry: other nodes were in question at an earlier filter."""
    names = [NODE, *map(NodeName, ("node-2", "node-3"))]
    for name in names[1:]:
        world.tell(Says(name, machine(), RULES).all())
    world.scheduler.filter(member("a"), names[:2])
    world.scheduler.filter(member("a"), names[2:])

    assert names == sorted(await world.scheduler.best(member("a"), names[2]))
    assert names[:2] == sorted(await world.scheduler.best(member("a"), names[1]))
    assert names[:2] == sorted(await world.scheduler.best(member("a"), NEW))


async def test_victims_end_on_the_planned_node_of_a_gangs_pod_alone(world: OneNode) -> None:
    """On another one they would end for nothing: filter refuses it, and the scheduler goes on to the next victims."""
    other = Says(NodeName("node-2"), machine(), RULES)
    world.tell(other.all())
    for says in (world.says, other):
        world.tell(says.admit(pod(container("main", gpus=4)), f"on {says.node}"))
    victims = {says.node: Victims(uids=(f"on {says.node}",)) for says in (world.says, other)}
    world.planned[TWO.uid] = other.node
    helped = await world.scheduler.preempt(TWO, victims)
    for says in (world.says, other):
        world.tell(says.end(f"on {says.node}"))

    assert [other.node] == list(helped)
    assert tuple(helped) == world.scheduler.filter(TWO, tuple(victims)).passed


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
async def test_a_preemption_says_what_filter_says_when_the_victims_are_gone(first: int) -> None:
    """Of pods that the node shows, of pods that are bound and not shown yet, and for pods whose gang is planned."""
    tally = {True: 0, False: 0}
    for seed in range(first, first + 20):
        chance, cluster = Random(seed), Cluster(usage=True)
        planned = dict[str, NodeName]()
        scheduler, says = scheduler_of(cluster, planned), some_says(chance, NODE, Shapes())
        tell_all(cluster, says.all())
        uids = [f"uid-{number}" for number in range(4)]
        for number, uid in enumerate(uids):
            request = some_request(chance, says.hardware, f"b{number}")
            scheduler.view.expect(says.node, asked(request, uid))
            if number < 3:
                tell_all(cluster, says.admit(request, uid))
        victims = [uid for uid in uids if chance.random() < 0.5]
        pods = [asked(some_request(chance, says.hardware, f"o{number}")) for number in range(8)]
        planned |= {pods[0].uid: NEW, pods[1].uid: says.node}
        fits = [bool(await scheduler.preempt(each, {says.node: Victims(uids=tuple(victims))})) for each in pods]
        for uid in victims:
            scheduler.view.end(says.node, uid)
            tell_all(cluster, says.end(uid))
        for each, expected in zip(pods, fits, strict=True):
            assert expected == bool(scheduler.filter(each, (says.node,)).passed), (seed, each)
            tally[expected] += 1

    assert min(tally.values()) > 10


def test_scores_are_those_of_the_scorer_and_follow_the_nodes(world: OneNode) -> None:
    """Half of the second node is in use: by default it is filled first; what is not known has no score."""
    other = Says("node-2", machine(), RULES)
    world.tell(other.all())
    nodes = (NODE, NEW, NodeName("node-2"))
    empty = world.scheduler.prioritize(TWO, nodes)
    world.tell(other.admit(pod(container("main", gpus=2)), "a"))
    used = world.scheduler.prioritize(TWO, nodes)
    world.cluster.answers(NODE, False)

    assert empty[0] == empty[2] and empty[1] == 0 < empty[0]
    assert used[2] > used[0] > used[1] == 0
    assert [0, 0, used[2]] == world.scheduler.prioritize(TWO, nodes)
