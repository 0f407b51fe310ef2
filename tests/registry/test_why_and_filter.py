"""`why` says of each node what the registry's filter says, as both decide by the facts of the node."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest
from cluster_support import TIME
from faults_support import THOROUGH
from node_filters_support import naive
from view_support import Says, asked, scheduler_of, some_request, some_says, tell_all

from topoalign.cli import whole_cluster as kubectl
from topoalign.core.demand.node_filters import Constraints, NodeNotAllowed, NodeTraits
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes, NodeStale
from topoalign.core.diagnosis.node_records import ClusterRecord, record_node
from topoalign.core.hints.preconditions import UnknownResource
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.kubelet.files import manifest
from topoalign.registry.cluster_nodes import Cluster

KEYS = ("a", "b")
VALUES = ("", "x", "3", "5", "-4")
KEYS_OF_TAINTS = ("gpu", "node.kubernetes.io/unschedulable")
EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule")


def excluded_by(node: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Whether Kubernetes keeps this pod off this node, by the reference; both as manifests."""
    spec = pod["spec"]
    required = (
        (spec.get("affinity") or {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    return not naive(
        node["metadata"]["name"],
        node["metadata"]["labels"],
        node["spec"].get("taints", []),
        node["spec"].get("unschedulable", False),
        spec.get("nodeSelector", {}),
        None if required is None else required["nodeSelectorTerms"],
        spec.get("tolerations", []),
    )


def some_node_object(chance: Random, name: str) -> dict[str, Any]:
    """The manifest of a node; one of eight is cordoned, and one of three has a taint."""
    spec: dict[str, Any] = {}
    if chance.random() < 0.12:
        spec["unschedulable"] = True
    if chance.random() < 0.33:
        taint = {"key": chance.choice(KEYS_OF_TAINTS), "value": chance.choice(VALUES), "effect": chance.choice(EFFECTS)}
        spec["taints"] = [taint]
    labels = {key: chance.choice(VALUES) for key in KEYS if chance.random() < 0.7}
    return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "spec": spec}


def some_constraints(chance: Random, names: list[str]) -> dict[str, Any]:
    """The manifest of a pod with some of: nodeSelector, required node affinity, tolerations."""
    spec: dict[str, Any] = {}
    if chance.random() < 0.1:
        spec["nodeSelector"] = {chance.choice(KEYS): chance.choice(VALUES)}
    if chance.random() < 0.3:
        terms = [some_term(chance, names) for _ in range(chance.choice([1, 1, 2]))]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    if chance.random() < 0.6:
        spec["tolerations"] = [some_toleration(chance) for _ in range(chance.choice([1, 2]))]
    return {"kind": "Pod", "apiVersion": "v1", "spec": spec}


def some_term(chance: Random, names: list[str]) -> dict[str, Any]:
    if chance.random() < 0.3:
        field = {"key": "metadata.name", "operator": chance.choice(["In", "NotIn"]), "values": [chance.choice(names)]}
        return {"matchFields": [field]}
    operator = chance.choice(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])
    values = {"Exists": [], "DoesNotExist": [], "Gt": ["3"], "Lt": ["4"]}.get(operator)
    if values is None:
        values = chance.sample(VALUES, 2)
    return {"matchExpressions": [{"key": chance.choice(KEYS), "operator": operator, "values": values}]}


def some_toleration(chance: Random) -> dict[str, Any]:
    key = chance.choice((*KEYS_OF_TAINTS, ""))
    effect = chance.choice(("", *EFFECTS))
    if not key or chance.random() < 0.6:
        return {"key": key, "operator": "Exists", "effect": effect}
    return {"key": key, "operator": "Equal", "value": chance.choice(VALUES), "effect": effect}


SEEDS = 200 if THOROUGH else 20
SCORER = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)


def told(cluster: Cluster, chance: Random, nodes: list[Says]) -> None:
    """The nodes announce themselves, and their kubelets admit some pods."""
    for says in nodes:
        tell_all(cluster, says.all())
        for number in range(chance.randrange(4)):
            tell_all(cluster, says.admit(some_request(chance, says.hardware, f"p{number}"), f"uid-{number}"))


def codes_of_why(
    cluster: Cluster,
    pod: PodRequest,
    traits: Mapping[NodeName, NodeTraits] = {},
    constraints: Constraints | None = None,
) -> dict[NodeName, str]:
    """Node -> the code of its refusal, asked one by one; empty where it would admit the pod."""
    records = [
        msgspec.structs.replace(
            record_node(member.state, silent=not member.answering), traits=traits.get(member.state.node)
        )
        for member in cluster
    ]
    nodes = Nodes(ClusterRecord(time=TIME, nodes=tuple(records)), constraints)
    answer = diagnose(nodes, pod, SCORER)
    found = {each.node: "" for each in answer.admitting}
    return found | {
        name: each.code for each in answer.reasons for name in each.examples if each.nodes == len(each.examples)
    }


@pytest.mark.parametrize("first", range(0, SEEDS, 5))
def test_why_says_of_each_node_what_the_filter_says(first: int) -> None:
    """But for a resource that only other plugins list: a scheduler asks nodes about it before the filter is asked."""
    compared = fit = stale = 0
    for seed in range(first, first + 5):
        chance, cluster = Random(seed), Cluster(usage=True)
        scheduler, shapes = scheduler_of(cluster), Shapes()
        nodes = [some_says(chance, f"node-{number}", shapes) for number in range(3)]
        told(cluster, chance, nodes)
        for says in nodes:
            is_silent = seed == first and says is nodes[0]  # one at least, whatever chance says
            cluster.answers(says.node, chance.random() < 0.9 and not is_silent)
        for number in range(6):
            pod = some_request(chance, chance.choice(nodes).hardware, f"asked-{number}")

            filtered = scheduler.filter(asked(pod), cluster.nodes)
            expected = {**dict.fromkeys(filtered.passed, ""), **{n: each.code for n, each in filtered.refused.items()}}
            found = codes_of_why(cluster, pod)

            assert expected.keys() == found.keys()
            for name, code in expected.items():
                if UnknownResource.code not in (code, found[name]):
                    assert code == found[name]
                    compared, fit, stale = compared + 1, fit + (not code), stale + (code == NodeStale.code)
    assert compared > 30 and fit > 5 and stale > 0


PODS = 20
"""With constraints, on each cluster of three nodes; 50 clusters have 1,000 pods."""


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_why_excludes_the_nodes_that_kubernetes_keeps_a_pod_off(first: int) -> None:
    """
    A kube-scheduler asks the extender's filter about the nodes that its own filters leave to the pod. `why` gives the code
    of the filter for these, and `NodeNotAllowed` for the others, as an independent reference of the constraints has it.
    """
    seen: Counter[str] = Counter()
    for seed in range(first, first + 10):
        chance, cluster = Random(seed), Cluster(usage=True)
        scheduler, shapes = scheduler_of(cluster), Shapes()
        nodes = [some_says(chance, f"node-{number}", shapes) for number in range(3)]
        told(cluster, chance, nodes)
        for says in nodes:
            cluster.answers(says.node, chance.random() < 0.9)
        objects = {says.node: some_node_object(chance, says.node) for says in nodes}
        traits = {
            name: kubectl.traits_of(msgspec.convert(shown, kubectl.KubectlNode)) for name, shown in objects.items()
        }
        for number in range(PODS):
            pod = some_request(chance, chance.choice(nodes).hardware, f"asked-{number}")
            shown = some_constraints(chance, [*objects])
            constraints = manifest.constraints_of(manifest.read_manifest(shown))

            excluded = {name for name in objects if excluded_by(objects[name], shown)}
            filtered = scheduler.filter(asked(pod), [name for name in cluster.nodes if name not in excluded])
            expected = {
                **dict.fromkeys(excluded, NodeNotAllowed.code),
                **dict.fromkeys(filtered.passed, ""),
                **{name: each.code for name, each in filtered.refused.items()},
            }
            found = codes_of_why(cluster, pod, traits, constraints)

            assert expected.keys() == found.keys()
            for name, code in expected.items():
                if UnknownResource.code not in (code, found[name]):  # a scheduler asks nodes about it before the filter
                    assert code == found[name]
                    seen[code] += 1
    kept_off = seen[NodeNotAllowed.code]
    admitting = seen[""]
    assert min(kept_off, admitting, seen.total() - kept_off - admitting) > 50
