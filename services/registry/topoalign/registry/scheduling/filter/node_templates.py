"""
Predicts from its labels the decision of a node that does not exist yet, such as one that Cluster Autoscaler may add.

The template is the first of these that exists:

1. an existing node with the same label `topoalign.io/machine`;
2. the machine of that name in the catalogue;
3. an existing node with the same label `node.kubernetes.io/instance-type`.

If several nodes have the label, the template is the first by name. It has the hardware and the kubelet rules of that
node, without allocations. A machine of the catalogue has the rules of a kubelet with default configuration.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from topoalign.core.admission.prediction import NodeKind
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.machines import catalogue
from topoalign.registry.scheduling.cluster_state.view import UNKNOWN_NODE, ClusterView
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, PodClass

MACHINE = "topoalign.io/machine"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

UNCONFIGURED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, cpu_manager="none", memory_manager="None")


class NewNodes:
    """The decisions of unknown nodes for a pod class during one call, in which the view does not change."""

    def __init__(
        self, view: ClusterView, decisions: DecisionCache, request: PodClass, passes: Callable[[NodeName], bool]
    ) -> None:
        """`passes`: whether the filter passes a node because topoalign does not manage it."""
        self._view = view
        self._decisions = decisions
        self._request = request
        self._passes = passes
        # A call can have thousands of unknown nodes, so there is one decision for equal nodes.
        self._codes: dict[str | NodeKind, int] = {}
        """Code of a refusal, or kind of the template -> number of the refusal."""
        self._labelled: dict[tuple[str, str], NodeKind] | None = None
        """(Label, value) -> the kind of the first node with it."""

    def number(self, node: NodeName, labels: Mapping[str, str]) -> int:
        """Returns the number of the refusal by a node with these labels; 0: it would admit the pod or is unmanaged."""
        if self._passes(node):
            return 0
        code = self._view.foreign(node)
        what = code or self._template(labels) or UNKNOWN_NODE
        if what not in self._codes:
            code = what if isinstance(what, str) else self._decisions.judge_empty(self._request, what)
            self._codes[what] = self._decisions.number(code, helped=False)
        return self._codes[what]

    def _template(self, labels: Mapping[str, str]) -> NodeKind | None:
        """Returns the kind of a new node with these labels. None: there is no template."""
        if labels.keys().isdisjoint((MACHINE, INSTANCE_TYPE)):  # always the case if the scheduler sends only names
            return None
        if self._labelled is None:
            self._labelled = kinds_by_label(self._view)
        machine = labels.get(MACHINE, "")
        of_machine = self._labelled.get((MACHINE, machine)) or template_of_machine(machine)
        return of_machine or self._labelled.get((INSTANCE_TYPE, labels.get(INSTANCE_TYPE, "")))


def kinds_by_label(view: ClusterView) -> dict[tuple[str, str], NodeKind]:
    """Returns (label, value) -> the kind of the first offered node with it, for the two labels of a template."""
    found: dict[tuple[str, str], NodeKind] = {}
    for name in sorted(view.nodes):
        kind = view.nodes[name].kind
        labels = view.labels(name)
        if kind is not None:
            for label in labels.keys() & {MACHINE, INSTANCE_TYPE}:
                found.setdefault((label, labels[label]), kind)
    return found


@lru_cache(maxsize=32)
def template_of_machine(machine: str) -> NodeKind | None:
    """Returns a machine of the catalogue, with a kubelet in default configuration. None: no machine has this name."""
    return NodeKind(catalogue.machine(machine), UNCONFIGURED, None) if machine in catalogue.names() else None
