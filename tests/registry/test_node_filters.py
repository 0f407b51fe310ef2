"""
Nodes that kube-scheduler's filters leave to a pod, against a reference that takes the manifests apart rule by rule; and what
`why` says of each node, which is what the registry's filter says, as both decide by the facts of the node.

Source of the rules: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and taint-and-toleration/.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest
from faults_support import THOROUGH
from hypothesis import given
from hypothesis import strategies as st
from view_support import TIME, Says, asked, scheduler_of, some_request, some_says, tell_all

from topoalign.cli import whole_cluster as kubectl
from topoalign.core.demand.node_filters import (
    Affinity,
    Constraints,
    NodeNotAllowed,
    NodeTraits,
    Taint,
    Toleration,
    is_node_eligible,
)
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


def number(text: str) -> int | None:
    """As an API server takes it: a sign or none, and digits; of 64 bits."""
    if not text.strip("0123456789+-") and text.lstrip("+-") and len(text) - len(text.lstrip("+-")) <= 1:
        return int(text) if -(2**63) <= int(text) < 2**63 else None
    return None


def expression_holds(labels: dict[str, str], key: str, operator: str, values: list[str]) -> bool:
    there = key in labels
    if operator in ("Gt", "Lt"):
        if not there or len(values) != 1:
            return False
        left, right = number(labels[key]), number(values[0])
        return left is not None and right is not None and (left > right if operator == "Gt" else left < right)
    if operator in ("Exists", "DoesNotExist"):
        return not values and there == (operator == "Exists")
    if not values:
        return False
    one_of = there and labels[key] in set(values)
    return {"In": one_of, "NotIn": not one_of}.get(operator, False)


def field_holds(name: str, key: str, operator: str, values: list[str]) -> bool:
    found = name if key == "metadata.name" else ""
    return len(values) == 1 and {"In": found == values[0], "NotIn": found != values[0]}.get(operator, False)


def term_holds(term: dict[str, Any], name: str, labels: dict[str, str]) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    results = [
        expression_holds(labels, each["key"], each["operator"], each.get("values") or []) for each in expressions
    ]
    results += [field_holds(name, each["key"], each["operator"], each.get("values") or []) for each in fields]
    return len(results) > 0 and False not in results


def is_tolerated(taint: dict[str, str], tolerations: list[dict[str, str]]) -> bool:
    for each in tolerations:
        same_effect = each.get("effect", "") == "" or each["effect"] == taint["effect"]
        same_key = each.get("key", "") == "" or each["key"] == taint["key"]
        operator = each.get("operator", "Equal")
        same_value = operator == "Exists" or (operator == "Equal" and each.get("value", "") == taint["value"])
        if same_effect and same_key and same_value:
            return True
    return False


def naive(
    name: str,
    labels: dict[str, str],
    taints: list[dict[str, str]],
    cordoned: bool,
    selector: dict[str, str],
    terms: list[dict[str, Any]] | None,
    tolerations: list[dict[str, str]],
) -> bool:
    """Whether the node is for the pod."""
    for key, value in selector.items():
        if key not in labels or labels[key] != value:
            return False
    if terms is not None and not [term for term in terms if term_holds(term, name, labels)]:
        return False
    cordon = {"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"}
    for taint in [*taints, *([cordon] if cordoned else [])]:
        if taint["effect"] != "PreferNoSchedule" and not is_tolerated(taint, tolerations):
            return False
    return True


some_keys, some_values = (
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["", "x", "y", "3", "-4", "+5", "1_0", "9" * 19, "9" * 18]),
)
some_effects = st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])
some_labels = st.dictionaries(some_keys, some_values)
some_expressions = st.fixed_dictionaries(
    {
        "key": some_keys,
        "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Near"]),
        "values": st.none() | st.lists(some_values, max_size=2),
    }
)
some_fields = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["metadata.name", "metadata.name", "metadata.uid"]),
        "operator": st.sampled_from(["In", "NotIn", "Exists"]),
        "values": st.none() | st.lists(st.sampled_from(["n1", "n2"]), max_size=2),
    }
)
some_terms = st.fixed_dictionaries(
    {
        "matchExpressions": st.none() | st.lists(some_expressions, max_size=2),
        "matchFields": st.none() | st.lists(some_fields, max_size=1),
    }
)
some_taints = st.fixed_dictionaries(
    {"key": some_keys | st.just("node.kubernetes.io/unschedulable"), "value": some_values, "effect": some_effects}
)
some_tolerations = st.fixed_dictionaries(
    {},
    optional={
        "key": some_keys | st.just("node.kubernetes.io/unschedulable"),
        "operator": st.sampled_from(["Exists", "Equal", "Near"]),
        "value": some_values,
        "effect": some_effects,
    },
)


@given(
    some_labels,
    st.lists(some_taints, max_size=2),
    st.booleans(),
    st.dictionaries(some_keys, some_values, max_size=1),
    st.none() | st.lists(some_terms, max_size=2),
    st.lists(some_tolerations, max_size=2),
)
def test_a_node_is_for_a_pod_as_the_reference_says(
    labels: dict[str, str],
    taints: list[dict[str, str]],
    cordoned: bool,
    selector: dict[str, str],
    terms: list[dict[str, Any]] | None,
    tolerations: list[dict[str, str]],
) -> None:
    required = {"nodeSelectorTerms": terms}
    affinity = msgspec.convert(
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required if terms is not None else None}},
        Affinity,
    )
    assert affinity.node_affinity is not None
    pod = Constraints(selector, affinity.node_affinity.required, msgspec.convert(tolerations, tuple[Toleration, ...]))
    node = NodeTraits(
        name=NodeName("n1"),
        labels=labels,
        taints=msgspec.convert(taints, tuple[Taint, ...]),
        unschedulable=cordoned,
    )

    assert naive("n1", labels, taints, cordoned, selector, terms, tolerations) == is_node_eligible(node, pod)


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [("Gt", ["7"], True), ("Gt", ["8"], False), ("Lt", ["9"], True), ("Lt", ["8"], False), ("Gt", ["x"], False)],
)
def test_numbers_of_labels_are_compared(operator: str, values: list[str], expected: bool) -> None:
    """More than 7 GPUs, fewer than 9."""
    term = {"matchExpressions": [{"key": "gpus", "operator": operator, "values": values}]}
    selector = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    affinity = msgspec.convert(selector, Affinity).node_affinity
    assert affinity is not None

    node = NodeTraits(name=NodeName("n1"), labels={"gpus": "8"})
    assert expected == is_node_eligible(node, Constraints(required=affinity.required))


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
