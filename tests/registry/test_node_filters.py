"""Nodes that kube-scheduler's filters leave to a pod, against a reference that takes the manifest apart rule by rule."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_filters_support import naive

from topoalign.core.demand.node_filters import Affinity, Constraints, NodeTraits, Taint, Toleration, is_node_eligible
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
