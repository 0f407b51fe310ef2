"""
Caches the decision of each node for each class of pods. Only nodes that have changed decide again.

Pods with the same request form one `PodClass`. Pod names do not matter: a pending pod holds nothing, and allocations
under the same name belong to another pod (`as_others`). For each class and node, the cache has one byte (the refusal's
number; 0: none) and the sort key of the node. For each class, it has the cluster version up to which these are valid.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from topoalign.core.admission.admit import decide_demand, drive_async
from topoalign.core.admission.feasibility import PodNeed, alignment_need, judge_amounts, need_of, need_steps
from topoalign.core.admission.prediction import NodeKind
from topoalign.core.admission.resolvability import UNDECIDED, with_healthy_devices, without_any_allocation
from topoalign.core.admission.share_alignment import containers_aligned_to_gpus
from topoalign.core.demand.pod_demand import PodDemand, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.share_annotations import CHOOSING, NO_USE_UUID, NODE_POLICY, USE_UUID
from topoalign.core.demand.shares import USUAL_AMOUNTS, amount_resources
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS
from topoalign.core.hints.preconditions import UnknownResource
from topoalign.core.model.decisions import Admission, Resolvability
from topoalign.core.model.events import HEALTHY
from topoalign.core.model.ids import GPU, NIC, ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import GPU_COUNT, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import without_uuids
from topoalign.core.scoring.scorers import Key, NodeScorer
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.registry.scheduling.cluster_state.view import ClusterView, NodeView
from topoalign.registry.scheduling.scheduling_api import Filtered, NodeRefusal, PodToSchedule
from topoalign.runtime.recent_dict import RecentDict
from topoalign.runtime.request_turns import TaskTurns

MOST_STALE = 4
"""Maximum number of keys per node. If there are more, most of them belong to earlier states."""


class NodeKeys:
    """The sort keys of the nodes for one pod class."""

    def __init__(self) -> None:
        # Thousands of nodes share few keys, so each key has a number.
        self.numbers: list[int] = []
        """Index of a node -> the number of its key."""
        self._keys: dict[Key, int] = {None: 0}

    def note(self, place: int, key: Key) -> None:
        """Sets the key of a node. None: it is not offered."""
        self.numbers.extend([0] * (place + 1 - len(self.numbers)))
        self.numbers[place] = self._keys.setdefault(key, len(self._keys))

    @property
    def are_stale(self) -> bool:
        """Whether most keys belong to no node, so that all should be computed again."""
        return len(self._keys) > MOST_STALE * len(self.numbers) + 64

    def scores_among(self, view: ClusterView, nodes: Sequence[NodeName], last: Collection[NodeName]) -> Sequence[int]:
        """A score from 0 to 10 for each of these nodes; 0 for one that is unknown, not offered, or in `last`."""
        of_nodes = self.numbers
        places = view.places
        pending = view.nodes_with_pending
        numbers = [of_nodes[places[name]] if name in places and name not in last else 0 for name in nodes]
        # Of nodes with equal keys, those with pending pods come last, because a bind may have to wait there.
        if pending:
            numbers = [-number if name in pending else number for name, number in zip(nodes, numbers, strict=True)]
        present = [*{*numbers}]
        keys = [*self._keys]
        ranked = [(*key, number < 0) if (key := keys[abs(number)]) is not None else None for number in present]
        scores = dict(zip(present, view.scorer.scores(ranked), strict=True))
        return [*map(scores.__getitem__, numbers)]


REQUESTS_KEPT = 1_024
"""Maximum number of cached pod classes. Each has one byte for each node."""
PODS_KEPT = 4_096
"""Maximum number of pods whose class is cached."""
MOST_SHAPES = 64
"""Maximum number of hardware shapes for which the part of a request that affects the score is cached."""
COUNTING = frozenset((*ANNOTATIONS, *CHOOSING, GPU_COUNT, NODE_POLICY))
"""Annotations that affect the choice of devices, the ranking of nodes, or refusals."""
NAMING_GPUS = frozenset((USE_UUID, NO_USE_UUID))
"""Annotations with GPU UUIDs. Because of them, nodes of one kind can decide differently."""
NAMESPACE = Namespace("pod to schedule")
POD = PodName("pod to schedule")
"""Placeholder names, which no pod can have: decisions do not depend on names."""
DEVICES_UNKNOWN = "DevicesUnknown"
"""A device plugin has registered the resource, but its devices are unknown, so no decision can be predicted."""


class KindNeed:
    """A pod class evaluated for the nodes of one kind."""

    def __init__(self, demand: PodDemand, need: PodNeed | None, kind: NodeKind, view: ClusterView) -> None:
        """`need`: the amounts that the pod needs on nodes of this kind. None: amounts alone do not decide."""
        self.demand = demand
        self.need = need
        self.is_decided_by_amounts = need is not None and need.complete
        self.unlisted = unlisted(self.demand, kind, view)
        """Code of the refusal if nodes of this kind do not have a requested resource; empty: there is no refusal."""
        self._kind = kind
        self._score_needs: dict[int, tuple[Topology, Any]] = {}
        """`id` of a shape -> the shape, kept so that its id is not reused, and the result of `scorer.need`."""

    @cached_property
    def takes(self) -> PodNeed | None:
        """The amounts that the pod takes from the NUMA nodes to which a kubelet aligns it. None: unknown."""
        if self.need is not None and self.need.strict:  # a pod without annotations about devices
            return self.need
        bare = msgspec.structs.replace(self.demand.request, annotations={})
        return alignment_need(self._kind.topology, pod_demand(bare, self._kind.rules))

    @cached_property
    def on_empty(self) -> str:
        """The code of the refusal by a healthy node of this kind without pods; empty: it admits the pod."""
        return decide_code(empty(self._kind), self.demand)

    @cached_property
    def may_be_parted(self) -> bool:
        """
        Whether the kubelet could refuse the pod after aligning it to other NUMA nodes, which may have too little of the
        resources that it does not count there: parts of GPUs, co-allocated devices, and devices of later containers.
        """
        has_rest = self.takes is not None and self.takes.rest is not None
        is_joint = any(each.joint is not None for each in self.demand.containers)
        return has_rest or is_joint or bool(containers_aligned_to_gpus(self._kind.topology, self.demand))

    def key(self, node: NodeView, scorer: NodeScorer) -> Key:
        """The sort key of a node of this kind for the pod; None if the free resources of the node are unknown."""
        if (shape := node.shape) is None:
            return None
        if id(shape) not in self._score_needs:
            if len(self._score_needs) >= MOST_SHAPES:
                self._score_needs.clear()
            self._score_needs[id(shape)] = shape, scorer.need(shape, self.demand)
        return scorer.key(shape, self._score_needs[id(shape)][1], node.left)


class RefusedByAll(NamedTuple):
    """The last answer to a call in which all nodes refused a pod of the class."""

    version: int
    """The version of the cluster for which this is valid."""
    nodes: frozenset[NodeName]
    filtered: Filtered
    counts: Counter[str]
    """Label of a refusal -> number of nodes."""


class PodClass:
    """Pods for which each node makes the same decision, with the decision of each node."""

    def __init__(self, pod: PodRequest) -> None:
        """`pod`: a valid request with placeholder names."""
        self.pod = pod
        self.key = msgspec.json.encode(pod, order="deterministic")
        self.codes = bytearray()
        """Node index -> 0 if the node would admit the pod, otherwise the number of the refusal."""
        self.version = -1
        """The version of the cluster up to which `codes` and `keys` are valid."""
        self.refused_by_all: RefusedByAll | None = None
        """The answer to the last call if all of its nodes refused. Reused for other pending pods of the class."""
        self.keys = NodeKeys()
        self._needs: WeakKeyDictionary[NodeKind, KindNeed] = WeakKeyDictionary()

    def of(self, kind: NodeKind, view: ClusterView) -> KindNeed:
        """Evaluates the class for the nodes of a kind. Raises InvalidField."""
        need = self._needs.get(kind)
        if need is None:
            demand = pod_demand(self.pod, kind.rules)
            need = self._needs[kind] = KindNeed(demand, need_of(kind.topology, demand), kind, view)
        return need

    async def prepare(self, kind: NodeKind, view: ClusterView, turns: TaskTurns) -> None:
        """Does the work of `of` in steps, and yields to the event loop between them. Raises InvalidField."""
        if kind in self._needs:
            return

        async def give(_: None) -> None:
            await turns.give()

        demand = pod_demand(self.pod, kind.rules)
        await turns.give()
        need = await drive_async(need_steps(kind.topology, demand), give)
        self._needs[kind] = KindNeed(demand, need, kind, view)

    def reset(self) -> None:
        """Drops all decisions."""
        self.version = -1
        self.refused_by_all = None
        self._needs.clear()
        self.keys = NodeKeys()


class PodClasses:
    """The classes of recently requested pods."""

    def __init__(self) -> None:
        self._pods = RecentDict[str, tuple[PodRequest, PodClass]](PODS_KEPT)
        """UID -> the pod, and its class."""
        self._requests = RecentDict[object, PodClass](REQUESTS_KEPT)

    def of(self, pod: PodToSchedule) -> PodClass:
        """The class of a pod. Raises InvalidField for an invalid pod."""
        request, made = self._pods.get(pod.uid, (None, None))
        if made is None or request != pod.request:
            made = PodClass(nameless(validate_pod(pod.request)))
        kept = self._requests.get(made.key, made)  # one object for all pods with this request
        self._requests[made.key] = kept
        self._pods[pod.uid] = pod.request, kept
        return kept

    def reset(self) -> None:
        """Drops all decisions."""
        for each in self._requests.values():
            each.reset()


class DecisionCache:
    """The decision of each node for each pod class."""

    def __init__(
        self,
        view: ClusterView,
        classes: PodClasses,
        conflict: Callable[[PodClass, NodeView], str] = lambda request, node: "",
    ) -> None:
        """
        `classes`: all pod classes. `conflict`: returns the code of the refusal if a pod would take resources that
        planned pods need; otherwise empty.
        """
        self._view = view
        self._classes = classes
        self._conflict = conflict
        self._resources = view.offers.names
        self.refusals = [NodeRefusal(code="")]
        """The refusals by number; 0 stands for none."""
        self._numbers: dict[NodeRefusal, int] = {}

    def codes(self, request: PodClass) -> bytearray:
        """Node index -> number of the refusal; 0 if the node would admit the pod. Raises InvalidField."""
        view = self._view
        self._note_resources()
        if request.version < view.version:
            request.codes.extend(bytes(view.size - len(request.codes)))
            for node in view.changed_since(request.version):
                self._note(request, node)
            request.version = view.version
        return request.codes

    async def prepare(self, request: PodClass) -> None:
        """Does the work of `codes` and yields to the event loop. Takes seconds if amounts alone do not decide."""
        turns = self._view.turns()
        self._note_resources()
        if request.keys.are_stale:
            request.reset()
        while request.version < self._view.version:
            for kind in {node.kind for node in self._view.changed_since(request.version) if node.kind is not None}:
                await request.prepare(kind, self._view, turns)
            request.codes.extend(bytes(self._view.size - len(request.codes)))
            due = [(node.version, node) for node in self._view.changed_since(request.version)]
            if not due:  # the changed nodes were dropped
                return
            # Starts with the oldest change, so that the next call can continue from the point where this one stops.
            for version, node in reversed(due):
                if self._view.nodes.get(node.name) is node and node.version == version:  # a changed node is due again
                    self._note(request, node)
                request.version = version
                await turns.give()
                self._note_resources()
                if request.version != version:  # another call has added or dropped decisions
                    break

    def _note_resources(self) -> None:
        """Drops all decisions if the offered resources have changed: resources that no node offers may be ignored."""
        if self._resources != self._view.offers.names:
            self._resources = self._view.offers.names
            self._classes.reset()

    def _note(self, request: PodClass, node: NodeView) -> None:
        code = self.judge(request, node)
        resolvability = self.resolvability(request, node) if code else None
        need = None if node.kind is None else request.of(node.kind, self._view)
        # The end of other pods can help if the node is offered and the refusal depends on free resources.
        may_help = need is not None and not need.unlisted and (need.need is None or not need.need.refused)
        request.codes[node.place] = self.number(
            code, helped=resolvability is None and may_help, resolvability=resolvability
        )
        request.keys.note(node.place, None if need is None else need.key(node, self._view.scorer))

    def judge(self, request: PodClass, node: NodeView) -> str:
        """The code of a node's refusal; empty if it would admit the pod. Raises InvalidField."""
        if node.refusal or node.kind is None:
            return node.refusal
        asked = request.of(node.kind, self._view)
        if asked.unlisted:
            return asked.unlisted
        code = judge_amounts(asked.need, node.free) if asked.need is not None and node.free is not None else None
        code = decide_code(self._view.basis(node).state, asked.demand) if code is None else code
        return code or self._conflict(request, node)

    def judge_empty(self, request: PodClass, kind: NodeKind) -> str:
        """Same as `judge`, for a healthy node of this kind without pods."""
        asked = request.of(kind, self._view)
        return asked.unlisted or asked.on_empty

    def resolvability(self, request: PodClass, node: NodeView) -> Resolvability | None:
        """Why the end of other pods would not help on a node that refuses the pod. None: it may help, or is unknown."""
        if node.refusal or node.kind is None:
            return None
        asked = request.of(node.kind, self._view)
        if asked.unlisted:
            return None
        on_empty = asked.on_empty  # the same for all nodes of a kind if the pod names no GPUs
        if not NAMING_GPUS.isdisjoint(request.pod.annotations):
            on_empty = decide_code(
                with_healthy_devices(without_any_allocation(self._view.basis(node).state)), asked.demand
            )
        if on_empty in UNDECIDED:
            return None
        if on_empty:
            return Resolvability.NEVER
        if node.idle is None:
            return None
        code = judge_amounts(asked.need, node.idle) if asked.need is not None else None
        code = decide_code(without_any_allocation(self._view.basis(node).state), asked.demand) if code is None else code
        return Resolvability.UNHEALTHY if code and code not in UNDECIDED else None

    def number(self, code: str, *, helped: bool, resolvability: Resolvability | None = None) -> int:
        """The number of a refusal; 0 for none. `helped`, `resolvability`: as in `NodeRefusal`."""
        if not code:
            return 0
        refusal = NodeRefusal(code=code, helped_by_victims=helped, resolvability=resolvability)
        number = self._numbers.get(refusal)
        if number is None:
            number = self._numbers[refusal] = len(self.refusals)
            self.refusals.append(refusal)
        return number


def decide_code(state: NodeState, demand: PodDemand) -> str:
    """The code of the refusal; empty: the pod is admitted."""
    decision = decide_demand(state, demand)
    return "" if isinstance(decision, Admission) else decision.code


def empty(kind: NodeKind) -> NodeState:
    """A healthy node of this kind without pods and without device UUIDs."""
    hardware = without_uuids(kind.topology)
    devices = (*hardware.gpu_by_id, *hardware.nic_by_id, *(other.id for other in hardware.others))
    return initial_state(NodeName(""), hardware, dict.fromkeys(devices, HEALTHY), "")


def unlisted(demand: PodDemand, kind: NodeKind, view: ClusterView) -> str:
    """The code of the refusal for a resource that nodes of this kind do not list; empty: there is none."""
    missing = demand.device_names - kind.topology.devices.keys() - amount_resources(kind.topology)
    if kind.registered is not None and missing & kind.registered:
        return DEVICES_UNKNOWN
    # Like the kubelet, ignore a resource that no node offers and no plugin has registered. But do not ignore amounts of
    # GPUs in slots, because the pod would get a whole GPU or none.
    return UnknownResource.code if missing & (view.offers.names | {GPU, NIC, *USUAL_AMOUNTS}) else ""


def nameless(pod: PodRequest) -> PodRequest:
    """The request of a valid pod, with placeholder names and only the annotations that affect decisions."""
    init, containers = (
        tuple(msgspec.structs.replace(each, name=ContainerName(f"{group}-{n}")) for n, each in enumerate(of_group))
        for group, of_group in (("init", pod.init_containers), ("app", pod.containers))
    )
    return msgspec.structs.replace(
        pod,
        namespace=NAMESPACE,
        name=POD,
        annotations={key: value for key, value in pod.annotations.items() if key in COUNTING},
        init_containers=init,
        containers=containers,
        claims=(),
        pod_groups=(),
    )
