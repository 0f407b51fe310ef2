"""What each node would say to a pod, decided again only where something changed."""

from random import Random

import pytest
from faults_support import THOROUGH
from view_support import Says, asked, scheduler_of, some_request, some_says, tell_all

from topoalign.core.admission.prediction import KubeletUnknown, predict
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Event
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.shapes import Shapes
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.filter.scheduler import Scheduler

SEEDS = 400 if THOROUGH else 40
STEPS = 25


def news(chance: Random, says: Says, number: int) -> list[Event]:
    """What a node says next: the kubelet admits a pod, one ends, something is ill or is told again."""
    kind = chance.choice(("admit", "admit", "admit", "end", "ill", "again", "snapshot"))
    if kind == "admit":
        pod = some_request(chance, says.hardware, f"p{number % 5}")
        return list(says.admit(pod, f"uid-{number}", bound=chance.random() < 0.8))
    if kind == "end" and says.entries:
        return list(says.end(chance.choice(says.entries).pod_uid))
    if kind == "ill":
        cards = [*says.hardware.gpu_by_id]
        says.ill = frozenset(card for card in cards if chance.random() < 0.2)
        return [says.health()]
    return [says.snapshot()] if kind == "snapshot" else [says.usage()]


def said(scheduler: Scheduler, pod: PodRequest, nodes: tuple[NodeName, ...]) -> dict[NodeName, str]:
    """Node -> the code of its refusal; empty: it would admit the pod."""
    filtered = scheduler.filter(asked(pod), nodes)
    return {**dict.fromkeys(filtered.passed, ""), **{node: each.code for node, each in filtered.refused.items()}}


def predicted(cluster: Cluster, pod: PodRequest, node: NodeName) -> str | None:
    """What the node itself would say; None where the filter says more than a prediction."""
    try:
        decision = predict(cluster.member(node).state, pod, 0.0)
    except (InvalidField, KubeletUnknown):
        return None
    return "" if isinstance(decision, Admission) else decision.code


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_a_view_renewed_fact_by_fact_is_one_made_of_all_facts(first: int) -> None:
    """And what it says of a pod is what each node's own prediction says, also of a pod whose name is in use there."""
    compared = passed = 0
    for seed in range(first, first + 10):
        chance, shapes, cluster = Random(seed), Shapes(), Cluster(usage=True)
        scheduler = scheduler_of(cluster)
        nodes = [some_says(chance, f"node-{number}", shapes) for number in range(3)]
        for says in nodes:
            tell_all(cluster, says.all())
        pods = [some_request(chance, chance.choice(nodes).hardware, f"p{number}") for number in range(5)]
        for number in range(STEPS):
            says = chance.choice(nodes)
            tell_all(cluster, news(chance, says, number))
            for pod in chance.sample(pods, 2):
                for node, code in said(scheduler, pod, cluster.nodes).items():
                    expected = predicted(cluster, pod, node)
                    if expected is not None and code != "UnknownResource":
                        assert expected == code, (seed, number, node, pod)
                        compared += 1
                        passed += not code
        fresh = scheduler_of(cluster)
        for pod in pods:
            assert said(fresh, pod, cluster.nodes) == said(scheduler, pod, cluster.nodes), seed

    assert compared > 500 and 100 < passed < compared
