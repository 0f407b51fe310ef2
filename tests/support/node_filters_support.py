"""
Kubernetes' constraints between pods and nodes: a reference that takes the manifests apart rule by rule, and random ones.

Source of the rules: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and taint-and-toleration/.
"""

from random import Random
from typing import Any

KEYS = ("a", "b")
VALUES = ("", "x", "3", "5", "-4")
KEYS_OF_TAINTS = ("gpu", "node.kubernetes.io/unschedulable")
EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule")


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
