"""
Applies the kube-scheduler filters that use only the pod and the node as the API server reports them.

A node is eligible for a pod if all of the following are true:

- It has every label of `nodeSelector`.
- At least one term of the required node affinity, if there is one, matches it.
- The pod tolerates each of its taints with effect NoSchedule or NoExecute.
- It is not cordoned, or the pod tolerates the taint of cordoned nodes.

A term matches if all its expressions and fields match. An empty term matches nothing, and neither does a term that the
API server would refuse. Inter-pod affinity, volumes and ports are not considered.

Source: Kubernetes v1.36, plugins NodeAffinity, TaintToleration and NodeUnschedulable; k8s.io/component-helpers,
scheduling/corev1 (`nodeaffinity`, `ToleratesTaint`); k8s.io/apimachinery, labels (`Requirement.Matches`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from topoalign.core.demand.go_text import parse_int
from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.ids import NodeName

UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
"""Key of the taint of cordoned nodes. A cordoned node is treated as if it had the taint."""
REPELLING = ("NoSchedule", "NoExecute")


class Taint(msgspec.Struct, frozen=True):
    """An entry of a node's `spec.taints`."""

    key: str
    effect: str
    value: str = ""


class Toleration(msgspec.Struct, frozen=True):
    """An entry of a pod's `spec.tolerations`. An empty effect or key matches all."""

    key: str = ""
    operator: str = ""
    """`Exists` or `Equal`. Empty means `Equal`."""
    value: str = ""
    effect: str = ""


class Requirement(msgspec.Struct, frozen=True):
    """An entry of `matchExpressions` or `matchFields`."""

    key: str
    operator: str
    values: list[str] | None = None


class Term(msgspec.Struct, frozen=True, rename="camel"):
    """An entry of `nodeSelectorTerms`."""

    match_expressions: list[Requirement] | None = None
    match_fields: list[Requirement] | None = None


class NodeSelector(msgspec.Struct, frozen=True, rename="camel"):
    """`requiredDuringSchedulingIgnoredDuringExecution` of a node affinity."""

    node_selector_terms: list[Term] | None = None


class NodeAffinity(msgspec.Struct, frozen=True):
    """The field `affinity.nodeAffinity` of a pod."""

    required: NodeSelector | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(msgspec.Struct, frozen=True, rename="camel"):
    """The field `affinity` of a pod."""

    node_affinity: NodeAffinity | None = None


class Constraints(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod's constraints on the nodes that it can be scheduled to."""

    labels: Mapping[str, str] = {}
    required: NodeSelector | None = None
    """The required terms of its node affinity. None: there are none."""
    tolerations: tuple[Toleration, ...] = ()


class NodeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a Kubernetes node that these filters read."""

    name: NodeName
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class NodeNotAllowed(NoFit):
    """
    Raised when Kubernetes excludes a node for a pod, regardless of the node's free resources.

    Remedy: Change the pod's nodeSelector, affinity or tolerations, or uncordon the node.
    """

    def __init__(self, exclusions: Sequence[str]) -> None:
        """`exclusions`: the result of `list_exclusions`; empty: Kubernetes has no such node."""
        super().__init__(
            f"excluded by {', '.join(map(clean, exclusions))}" if exclusions else "Kubernetes has no such node",
            "change the pod's nodeSelector, affinity or tolerations, or uncordon the node",
        )


def is_node_eligible(node: NodeTraits, pod: Constraints) -> bool:
    """Whether the node is eligible for the pod."""
    return next(list_exclusions(node, pod), None) is None


def list_exclusions(node: NodeTraits, pod: Constraints) -> Iterator[str]:
    """
    What excludes the node: `cordon`, `taint gpu=yes:NoSchedule` (in kubectl's format), `nodeSelector pool=a`, `required
    node affinity`. A cordoned node has both the field and the taint, which count as one exclusion.
    """
    taints = [taint for taint in node.taints if taint.effect in REPELLING]
    if node.unschedulable:
        taints.append(Taint(UNSCHEDULABLE, "NoSchedule"))
    not_tolerated = (taint for taint in taints if not any(_tolerates_taint(each, taint) for each in pod.tolerations))
    yield from dict.fromkeys(map(_format_taint, not_tolerated))
    for key, value in pod.labels.items():
        if node.labels.get(key) != value:
            yield f"nodeSelector {key}={value}"
    terms = pod.required.node_selector_terms or () if pod.required is not None else None
    if terms is not None and not any(_term_matches(term, node) for term in terms):
        yield "required node affinity"


def _format_taint(taint: Taint) -> str:
    if taint.key == UNSCHEDULABLE:  # a cordoned node
        return "cordon"
    value = f"={taint.value}" if taint.value else ""
    return f"taint {taint.key}{value}:{taint.effect}"


def _term_matches(term: Term, node: NodeTraits) -> bool:
    """Whether all expressions and fields of the term match the node; False if there are none."""
    expressions = term.match_expressions or ()
    fields = term.match_fields or ()
    return (
        bool(expressions or fields)
        and all(_labels_meet(each, node.labels) for each in expressions)
        and all(_field_meets(each, {"metadata.name": node.name}) for each in fields)
    )


def _labels_meet(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    found = labels.get(requirement.key)
    values = requirement.values or []
    match requirement.operator:
        case "In":
            return found in values
        case "NotIn":
            return bool(values) and found not in values
        case "Exists":
            return found is not None and not values
        case "DoesNotExist":
            return found is None and not values
        case "Gt" | "Lt":
            return found is not None and _compare_label(requirement.operator, found, values)
    return False


def _compare_label(operator: str, found: str, values: Sequence[str]) -> bool:
    """Whether a label is greater (`Gt`) or less (`Lt`) than the only value. False if either is not an integer."""
    try:
        numbers = [parse_int(text, bits=64) for text in (found, *values)]
    except ValueError:
        return False
    if len(numbers) != 2:
        return False
    return numbers[0] > numbers[1] if operator == "Gt" else numbers[0] < numbers[1]


def _field_meets(requirement: Requirement, fields: Mapping[str, str]) -> bool:
    """Whether fields match a requirement of `matchFields`, which must have one value. Unknown fields count as empty."""
    if requirement.operator not in ("In", "NotIn") or len(requirement.values or ()) != 1:
        return False
    return (fields.get(requirement.key, "") in (requirement.values or ())) == (requirement.operator == "In")


def _tolerates_taint(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("", "Equal") and toleration.value == taint.value
