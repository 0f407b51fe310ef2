"""
What a node would be that is not there yet, by the labels that it would have: a node that an autoscaler may add.

`topoalign.io/machine` is the label of nodes that are there, or names the machine that they play, or one of the catalogue;
else nodes with the same `node.kubernetes.io/instance-type` tell. The new node is like the first of these by name: of its
hardware, and under the rules of its kubelet, with nothing allocated. Where no node is like the new one, a machine of the
catalogue has the rules of a kubelet without any configuration.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from topoalign.core.admission.kinds import NodeKind
from topoalign.core.model.events import DESCRIBED
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.machines import catalogue
from topoalign.registry.scheduling.cluster_state.nodes import UNKNOWN_NODE
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, Request

MACHINE = "topoalign.io/machine"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

UNCONFIGURED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, cpu_manager="none", memory_manager="None")


class NodeTemplates:
    """
    What new nodes would be, of a view that does not change meanwhile. The nodes that are there are looked through once for
    all new ones, and the same labels once: a question may be about thousands of nodes that nobody knows.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._known: dict[tuple[str, str], NodeKind | None] = {}
        self._labelled: dict[tuple[str, str], NodeKind] | None = None
        """Label and value, and as a label the empty text for the machine that is played -> the first node's kind."""

    def kind(self, labels: Mapping[str, str]) -> NodeKind | None:
        """The kind of a new node with these labels. None: it cannot be told."""
        said = labels.get(MACHINE, ""), labels.get(INSTANCE_TYPE, "")
        if said not in self._known:
            self._known[said] = next(self._likely(*said), None)
        return self._known[said]

    def _likely(self, machine: str, instance_type: str) -> Iterator[NodeKind]:
        """What it may be, the most certain first. Empty texts tell nothing."""
        if not machine and not instance_type:
            return
        if self._labelled is None:
            self._labelled = labelled(self._view)
        alike = self._labelled.get((INSTANCE_TYPE, instance_type)) if instance_type else None
        if machine:
            yield from filter(None, (self._labelled.get((label, machine)) for label in (MACHINE, "")))
            if machine in catalogue.names():
                yield described(machine) if alike is None else NodeKind(described(machine).topology, alike.rules, None)
        if alike is not None:
            yield alike


def labelled(view: ClusterView) -> dict[tuple[str, str], NodeKind]:
    """As `NodeTemplates._labelled`: by the labels of the offered nodes' Kubernetes Nodes, and by what they play."""
    found: dict[tuple[str, str], NodeKind] = {}
    for name in sorted(view.nodes):
        kind = view.nodes[name].kind
        announced = view.facts(name).topology
        if kind is None:
            continue
        for label in (MACHINE, INSTANCE_TYPE):
            found.setdefault((label, view.labels(name).get(label, "")), kind)
        if announced is not None and announced.source.startswith(DESCRIBED):
            found.setdefault(("", announced.source.removeprefix(DESCRIBED)), kind)
    return found


class NewNodes:
    """What nodes say to a request that the registry does not know, in one question about many."""

    def __init__(
        self, view: ClusterView, verdicts: DecisionCache, request: Request, passes: Callable[[NodeName], bool]
    ) -> None:
        """`passes`: whether the pod may go to a node because topoalign does not run it."""
        self._view = view
        self._decisions = verdicts
        self._request = request
        self._passes = passes
        self._templates = NodeTemplates(view)
        self._numbers: dict[str | NodeKind, int] = {}
        """By the code of a refusal, or by the kind that a node would be."""

    def number(self, node: NodeName, labels: Mapping[str, str]) -> int:
        """The number of the refusal by a node that would have these labels, or that others run; 0 where it would admit."""
        if self._passes(node):
            return 0
        code = self._view.foreign(node)
        kind = None if code else self._templates.kind(labels)
        what = code or kind or UNKNOWN_NODE
        if what not in self._numbers:
            told = what if isinstance(what, str) else self._decisions.judge_empty(self._request, what)
            self._numbers[what] = self._decisions.number(told, helped=False)
        return self._numbers[what]


@lru_cache(maxsize=32)
def described(machine: str) -> NodeKind:
    """A machine of the catalogue under a kubelet without any configuration."""
    return NodeKind(catalogue.machine(machine), UNCONFIGURED, None)
