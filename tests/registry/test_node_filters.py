"""Nodes that kube-scheduler's filters leave to a pod, against a reference that takes the manifest apart rule by rule."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.demand.node_filters import Affinity, Constraints, NodeTraits, Taint, Toleration, allows
from topoalign.core.model.ids import NodeName

KEYS, VALUES = (
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["", "x", "y", "3", "-4", "+5", "1_0", "9" * 19, "9" * 18]),
)
EFFECTS = st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])
LABELS = st.dictionaries(KEYS, VALUES)
EXPRESSIONS = st.fixed_dictionaries(
    {
        "key": KEYS,
        "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Near"]),
        "values": st.none() | st.lists(VALUES, max_size=2),
    }
)
FIELDS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["metadata.name", "metadata.name", "metadata.uid"]),
        "operator": st.sampled_from(["In", "NotIn", "Exists"]),
        "values": st.none() | st.lists(st.sampled_from(["n1", "n2"]), max_size=2),
    }
)
TERMS = st.fixed_dictionaries(
    {
        "matchExpressions": st.none() | st.lists(EXPRESSIONS, max_size=2),
        "matchFields": st.none() | st.lists(FIELDS, max_size=1),
    }
)
TAINTS = st.fixed_dictionaries(
    {"key": KEYS | st.just("node.kubernetes.io/unschedulable"), "value": VALUES, "effect": EFFECTS}
)
TOLERATIONS = st.fixed_dictionaries(
    {},
    optional={
        "key": KEYS | st.just("node.kubernetes.io/unschedulable"),
        "operator": st.sampled_from(["Exists", "Equal", "Near"]),
        "value": VALUES,
        "effect": EFFECTS,
    },
)


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
    expressions, fields = term["matchExpressions"] or [], term["matchFields"] or []
    results = [expression_holds(labels, each["key"], each["operator"], each["values"] or []) for each in expressions]
    results += [field_holds(name, each["key"], each["operator"], each["values"] or []) for each in fields]
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
    labels: dict[str, str],
    taints: list[dict[str, str]],
    cordoned: bool,
    selector: dict[str, str],
    terms: list[dict[str, Any]] | None,
    tolerations: list[dict[str, str]],
) -> bool:
    """Whether the node n1 is for the pod."""
    for key, value in selector.items():
        if key not in labels or labels[key] != value:
            return False
    if terms is not None and not [term for term in terms if term_holds(term, "n1", labels)]:
        return False
    cordon = {"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"}
    for taint in [*taints, *([cordon] if cordoned else [])]:
        if taint["effect"] != "PreferNoSchedule" and not is_tolerated(taint, tolerations):
            return False
    return True


@settings(max_examples=1000)
@given(
    LABELS,
    st.lists(TAINTS, max_size=2),
    st.booleans(),
    st.dictionaries(KEYS, VALUES, max_size=1),
    st.none() | st.lists(TERMS, max_size=2),
    st.lists(TOLERATIONS, max_size=2),
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

    assert naive(labels, taints, cordoned, selector, terms, tolerations) == allows(node, pod)


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
    assert expected == allows(node, Constraints(required=affinity.required))
