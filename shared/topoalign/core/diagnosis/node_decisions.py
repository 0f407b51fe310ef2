"""
Decides about a pod on each node of a cluster as its kubelet would. The result is a refusal code; empty: admitted.

Kubernetes' own constraints come first (`demand.node_filters`): no decision is made for a node that they exclude.

If the amounts are sufficient to decide (`feasibility`), a decision takes microseconds per node. Otherwise, the full
decision is made. Reservations for other pods count as held, and pods that are planned with a gang must still fit after
this pod (`planned`). A node admits no pod if its hardware, its health, its allocations or the rules of its kubelet are
unknown, if its allocator does not answer, or if another system allocates its GPUs. If only other nodes list a resource,
it is missing here. A resource that no node lists is ignored, as the kubelet does.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.feasibility import PodNeed, judge_amounts, need_of
from topoalign.core.admission.free_amounts import Free, count_free
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.admission.prediction import KubeletUnknown, NodeKind, kind_key, prediction_basis
from topoalign.core.admission.resolvability import explain_decision, with_healthy_devices, without_any_allocation
from topoalign.core.demand.node_filters import Constraints, NodeNotAllowed, list_exclusions
from topoalign.core.demand.pod_demand import PodDemand, check_rules, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.shares import USUAL_AMOUNTS, amount_resources
from topoalign.core.diagnosis.hami_nodes import REASONS, ForeignNode
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, fold_record
from topoalign.core.diagnosis.planned import GangFirst, fits_planned_pods
from topoalign.core.hints.preconditions import UnknownResource
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.errors import InvalidField, NoFit, TopoalignError, clean
from topoalign.core.model.ids import GPU, NIC, AllocationID, NodeName, ResourceName
from topoalign.core.model.requests import NO_CHANGES, PodRequest, RuleChanges, override_rules
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.memory_account import given_back
from topoalign.core.state.node_reservations import reserved_allocations

REMEDY = "see what the services of the node log, and who may publish on its subjects"


class NodeNotWhole(NoFit):
    """
    Raised when the hardware, the health or the allocations of a node are unknown.

    Remedy: Wait, or run `topoalign doctor` on the node.
    """

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"not received of the node: {missing}", "see that discovery and allocator run there (`topoalign doctor`)"
        )


class NodeStale(NoFit):
    """
    Raised when the allocator of the node does not answer.

    Remedy: Check that topoalign runs on the node.
    """

    def __init__(self) -> None:
        super().__init__("the allocator of the node does not answer", "look whether topoalign runs on it")


class DevicesUnknown(NoFit):
    """
    Raised when the devices of other plugins on the node are unknown.

    Remedy: Read the log of the node's allocator.
    """

    def __init__(self, resource: ResourceName) -> None:
        super().__init__(
            f"the kubelet has devices of {resource!r}, and what lists them is not known",
            "see that their plugin on the node lists healthy ones",
        )


@dataclass(frozen=True, eq=False)
class QueriedNode:
    """A node for which a decision can be made."""

    name: NodeName
    announced: Topology
    """The topology as the node announced it. Equal machines share its shape."""
    state: NodeState
    """The state as its kubelet has it, with the reservations as allocations."""
    kind: NodeKind
    free: Free
    """The free resources, under the rules of the kind."""
    reserved: frozenset[AllocationID] = frozenset()
    """The allocations in the state that are reservations, for pods that the node has not reported yet."""
    planned: tuple[Reservation, ...] = ()
    """The reservations that are planned with a gang, for pods whose bind has not begun."""

    def holding(self, allocations: Iterable[Allocation]) -> "QueriedNode":
        """The node with these allocations added."""
        state = self.state
        for each in allocations:
            state = state.holding(each)
        return self if state is self.state else self.changed(state)

    def without(self, gone: Collection[AllocationID]) -> "QueriedNode":
        """The node without these allocations. The kubelet returns memory of several NUMA nodes to the lowest first."""
        memory = self.state.memory
        for each in gone:
            had = msgspec.structs.replace(self.state.allocations[each], lowest_first=True)
            memory = given_back(memory, had)
        left = {each: held for each, held in self.state.allocations.items() if each not in gone}
        return self.changed(msgspec.structs.replace(self.state, allocations=left, memory=memory))

    def emptied(self) -> "QueriedNode":
        """The node without any allocation or reservation."""
        return replace(self.changed(without_any_allocation(self.state)), planned=())

    def restored(self) -> "QueriedNode | None":
        """The node with all devices healthy and not cordoned. None: they already are."""
        state = with_healthy_devices(self.state)
        return None if state is self.state else self.changed(state)

    def changed(self, state: NodeState) -> "QueriedNode":
        """The same node in another state."""
        return replace(self, state=state, free=count_free(state, self.kind.rules))


class ExcludedNode(NamedTuple):
    """A node that Kubernetes excludes for the pod."""

    name: NodeName
    reason: NodeNotAllowed
    node: QueriedNode | None
    """None: the decision of its kubelet is unknown."""


class Nodes:
    """All nodes of a cluster: those for which a decision can be made, and the reasons for the others."""

    def __init__(self, cluster: ClusterRecord, constraints: Constraints | None = None) -> None:
        """
        Reads each record, which takes 0.3 ms per node. `constraints`: those of the pod. They are applied if the nodes
        were read from Kubernetes.
        """
        self.asked: list[QueriedNode] = []
        self.excluded: list[ExcludedNode] = []
        """The nodes that Kubernetes excludes for the pod."""
        self.unasked: dict[NodeName, TopoalignError] = {}
        """Node -> why no decision can be made for it."""
        self._kinds: dict[object, NodeKind] = {}
        applied = constraints if cluster.has_traits else None
        for record in cluster.nodes:
            node = None
            error: TopoalignError | None = None
            try:
                node = self._node(record, cluster.time)
            except TopoalignError as known:
                error = known
            except ValueError as invalid:  # invalid data, such as memory on NUMA node -1
                error = InvalidField("usage", clean(str(invalid), 200), REMEDY)
            exclusion = None if applied is None else exclusion_of(record, applied)
            if exclusion is not None:
                self.excluded.append(ExcludedNode(record.node, exclusion, node))
            elif node is not None:
                self.asked.append(node)
            elif error is not None:
                self.unasked[record.node] = error
        machines = [each.topology for each in self._kinds.values()]
        self.resources = frozenset({GPU, NIC, *USUAL_AMOUNTS}).union(
            *((*each.devices, *amount_resources(each)) for each in machines)
        )
        """All resources that some node lists, the resource names of amounts of GPUs in slots, and the default names."""

    def __len__(self) -> int:
        return len(self.asked) + len(self.excluded) + len(self.unasked)

    def _node(self, record: NodeRecord, now: float) -> QueriedNode:
        """
        Raises ForeignNode, ContestedNode, NodeNotWhole, NodeStale and KubeletUnknown. Raises InvalidField for numbers
        that no machine has, and for rules with which no kubelet starts.
        """
        known = {"hardware": record.topology, "health": record.health, "allocations": record.allocations}
        if record.foreign:
            raise REASONS.get(record.foreign, ForeignNode)
        missing = [name for name, fact in known.items() if fact is None]
        state = fold_record(record)
        if missing or record.topology is None:
            raise NodeNotWhole(", ".join(missing))
        if record.silent:
            raise NodeStale
        check_ids(record.topology.topology.shape)
        kubelet = state.usage.kubelet if state.usage is not None else None
        if kubelet is not None and kubelet.rules.unknown:
            raise KubeletUnknown(record.node, kubelet.rules.unknown)
        basis = prediction_basis(state, now)
        check_rules(basis.rules)
        kind = self._kinds.setdefault(kind_key(basis), NodeKind(basis.state.hardware, basis.rules, basis.registered))
        reserved = [each for reservation in record.reserved for each in reserved_allocations(reservation)]
        names = frozenset(each.id for each in reserved)
        free = count_free(basis.state, basis.rules)
        planned = tuple(each for each in record.reserved if each.planned)
        return QueriedNode(record.node, record.topology.topology, basis.state, kind, free, names, planned).holding(
            reserved
        )


def exclusion_of(record: NodeRecord, constraints: Constraints) -> NodeNotAllowed | None:
    """Why Kubernetes excludes the node for the pod. None: it does not."""
    if record.traits is None:
        return NodeNotAllowed(())
    found = tuple(list_exclusions(record.traits, constraints))
    return NodeNotAllowed(found) if found else None


@computed_once
def check_ids(topology: Topology) -> None:
    """Raises InvalidField for an invalid or duplicate number of a CPU or NUMA node, because it prevents decisions."""
    ids = {
        "nodes": topology.node_ids,
        "cpus": [number for cpu in topology.cpus for number in (cpu.id, cpu.node)],
        "gpus": [node for gpu in topology.gpus for node in gpu.numa_affinity],
        "nics": [node for nic in topology.nics for node in nic.numa_affinity],
    }
    for path, numbers in ids.items():
        if not all(0 <= number <= LARGEST_ID for number in numbers):
            raise InvalidField(f"topology.{path}", "a number that no CPU or NUMA node has", REMEDY)
    for path, own in (("nodes", topology.node_ids), ("cpus", [cpu.id for cpu in topology.cpus])):
        if len({*own}) < len(own):
            raise InvalidField(f"topology.{path}", "a number stands twice", REMEDY)


class DemandOnKind(NamedTuple):
    """The demand of a pod on the nodes of one kind."""

    demand: PodDemand
    missing: NoFit | None
    """Why nodes of this kind do not have a requested resource, regardless of the free amounts. None: they have all."""
    need: PodNeed | None
    """None if a resource is missing."""


class ClusterQuestion:
    """A pod for which the nodes of a cluster decide."""

    def __init__(self, nodes: Nodes, pod: PodRequest, changes: RuleChanges = NO_CHANGES) -> None:
        """`changes` can have the policy, the scope, the device policy, the mode and `compat`. Raises InvalidField."""
        self.pod = validate_pod(pod)
        self.changes = changes
        self._nodes = nodes
        self._asked: dict[NodeKind, DemandOnKind] = {}

    def of(self, kind: NodeKind) -> DemandOnKind:
        """
        The pod's demand on nodes of this kind. Raises InvalidField for invalid rules and, in mode `best`, annotations.
        """
        if kind not in self._asked:
            demand = pod_demand(self.pod, override_rules(kind.rules, self.changes))
            listed = kind.topology.devices.keys() | amount_resources(kind.topology)
            missing: NoFit | None = None
            for name in sorted(demand.device_names - listed):
                if kind.registered is not None and name in kind.registered:
                    missing = DevicesUnknown(name)
                elif name in self._nodes.resources:
                    missing = UnknownResource(name, sorted(listed))
            need = need_of(kind.topology, demand) if missing is None else None
            self._asked[kind] = DemandOnKind(demand, missing, need)
        return self._asked[kind]

    @property
    def demands(self) -> Iterator[PodDemand]:
        """The demand of the pod by the rules of each kind of node that has decided."""
        return (asked.demand for asked in self._asked.values())

    def code(self, node: QueriedNode) -> str:
        """The code of the node's refusal. Empty: the node would admit the pod."""
        asked = self.of(node.kind)
        if asked.missing is not None:
            return asked.missing.code
        code = judge_amounts(asked.need, node.free) if asked.need is not None else None
        if code is None:
            decision = self.decide(node)
            code = "" if isinstance(decision, Admission) else decision.code
        if code or not node.planned:
            return code
        others = [each for each in node.planned if (each.namespace, each.pod) != (self.pod.namespace, self.pod.name)]
        return "" if fits_planned_pods(node.state, asked.demand, others) else GangFirst.code

    def decide(self, node: QueriedNode) -> Decision:
        """The full decision of the node."""
        demand = self.of(node.kind).demand
        return decide_demand(as_others(node.state, demand), demand)

    def explain(self, node: QueriedNode) -> Decision:
        """The full decision, with the amounts, the resolvability of a refusal and changes that would help."""
        demand = self.of(node.kind).demand
        return explain_decision(as_others(node.state, demand), demand)

    def admitting(self) -> list[QueriedNode]:
        """The nodes that would admit the pod."""
        return [node for node in self._nodes.asked if not self.code(node)]

    def changed(self, pod: PodRequest | None = None, rules: RuleChanges = NO_CHANGES) -> "ClusterQuestion":
        """The same question for another pod or with other rules."""
        return ClusterQuestion(self._nodes, pod or self.pod, {**self.changes, **rules})
