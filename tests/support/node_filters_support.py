"""
Kubernetes' constraints between pods and nodes: a reference that takes the manifests apart rule by rule.

Source of the rules: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and taint-and-toleration/.
"""

from typing import Any


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
