"""
What each node says to what a pod asks for, decided again only for the nodes that changed.

Pods that ask for the same are one `Request`, whatever their names: a pod that is to come holds nothing, and what a pod of
its name has on a node belongs to another one (`as_others`). For each request and node there is a byte, the number of the
refusal or 0, and the key that sorts the node; and the version of the cluster up to which they are right.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from topoalign.core.admission.admit import decide_demand, drive_async
from topoalign.core.admission.feasibility import PodNeed, alignment_need, judge_amounts, need_of, need_steps
from topoalign.core.admission.kinds import NodeKind
from topoalign.core.admission.resolvability import UNDECIDED, with_healthy_devices, without_any_allocation
from topoalign.core.admission.share_alignment import containers_aligned_to_gpus
from topoalign.core.demand.pod_demand import PodDemand, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.share_annotations import CHOOSING, NO_USE_UUID, NODE_POLICY, USE_UUID
from topoalign.core.demand.shares import USUAL_SLOTS, amount_resources
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS
from topoalign.core.hints.preconditions import UnknownResource
from topoalign.core.model.decisions import Admission, Resolvability
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import CARDS, ContainerRequest, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import without_uuids
from topoalign.core.scoring.scorers import Key, NodeScorer
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.registry.scheduling.cluster_state.nodes import NodeView
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.model import Filtered, NodeRefusal, PodToSchedule
from topoalign.runtime.request_turns import Turns

# The keys that sort nodes for what a pod asks for, and the scores that are made of them for the nodes that are asked
# about.
#
# Thousands of nodes share few keys. So each key has a number, and each node the number of its key.


MOST_STALE = 4
"""Keys for each node, above which most are those of nodes as they were."""


class NodeKeys:
    """The keys of the nodes of a cluster for one request."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """By the place of a node: the number of its key."""
        self._keys: dict[Key, int] = {None: 0}

    def note(self, place: int, key: Key) -> None:
        """Sets the key of a node. None: it is not offered."""
        self.numbers.extend([0] * (place + 1 - len(self.numbers)))
        self.numbers[place] = self._keys.setdefault(key, len(self._keys))

    @property
    def are_stale(self) -> bool:
        """Whether all keys are to be computed anew, because most belong to no node any more."""
        return len(self._keys) > MOST_STALE * len(self.numbers) + 64

    def scores_among(self, view: ClusterView, nodes: Sequence[NodeName], last: Collection[NodeName]) -> Sequence[int]:
        """
        A score for each of these nodes, in their order, 0 to 10; 0 for one that is not known, not offered, or to come
        `last`. Of nodes with equal keys those with pending pods come after the others, because a bind may have to wait for
        these. The keys are those of the newest nodes.
        """
        of_nodes = self.numbers
        places = view.places
        pending = view.nodes_with_pending
        numbers = [of_nodes[places[name]] if name in places and name not in last else 0 for name in nodes]
        if pending:
            numbers = [-number if name in pending else number for name, number in zip(nodes, numbers, strict=True)]
        present = [*{*numbers}]
        keys = [*self._keys]
        ranked = [(*key, number < 0) if (key := keys[abs(number)]) is not None else None for number in present]
        scores = dict(zip(present, view.scorer.scores(ranked), strict=True))
        return [*map(scores.__getitem__, numbers)]


REQUESTS_KEPT = 1_024
"""Requests whose verdicts are kept: a byte for each node and request."""
PODS_KEPT = 4_096
"""Pods of which it is kept which request they are."""
MOST_SHAPES = 64
"""For which it is kept what of a request its score depends on."""
COUNTING = frozenset((*ANNOTATIONS, *CHOOSING, CARDS, NODE_POLICY))
"""Annotations by which a pod's devices are decided, by which the nodes are ranked, and which some nodes refuse."""
NAMING_GPUS = frozenset((USE_UUID, NO_USE_UUID))
"""Annotations that nodes of one kind answer differently, because their GPUs have other uuids."""
NAMESPACE = Namespace("pod to schedule")
POD = PodName("pod to schedule")
"""Names that no pod can have: what is decided for a request depends on none."""
DEVICES_UNKNOWN = "DevicesUnknown"
"""The kubelet has such devices, and what is known of the node does not: nothing can be predicted."""
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


class Asked:
    """What a request is to the nodes of one kind."""

    def __init__(self, demand: PodDemand, need: PodNeed | None, kind: NodeKind, view: ClusterView) -> None:
        """`need`: what the demand comes to on nodes of this kind. None: more than amounts decides."""
        self.demand = demand
        self.need = need
        self.unlisted = unlisted(self.demand, kind, view)
        """Code of the refusal because of what no such node has; empty: there is nothing."""
        self._kind = kind
        self._score_needs: dict[int, tuple[Topology, Any]] = {}
        """By the identity of a shape, with the shape, so that no other one gets it."""

    @cached_property
    def takes(self) -> PodNeed | None:
        """What it takes of the NUMA nodes that a kubelet aligns it to: a kubelet knows no annotations. None: not known."""
        if self.need is not None and self.need.strict:  # a pod without annotations about devices
            return self.need
        bare = msgspec.structs.replace(self.demand.request, annotations={})
        return alignment_need(self._kind.topology, pod_demand(bare, self._kind.rules))

    @cached_property
    def on_empty(self) -> str:
        """The code of the refusal by a node of this kind on which nothing is allocated, all of it healthy; empty: none."""
        return decided(empty(self._kind), self.demand)

    @cached_property
    def may_be_parted(self) -> bool:
        """
        Whether a kubelet that aligns it elsewhere than now may find too little of what it does not align it by: parts of
        GPUs, what comes beside these by annotations, and what is for later containers.
        """
        has_rest = self.takes is not None and self.takes.rest is not None
        is_joint = any(each.joint is not None for each in self.demand.containers)
        return has_rest or is_joint or bool(containers_aligned_to_gpus(self._kind.topology, self.demand))

    def key(self, node: NodeView, scorer: NodeScorer[Any, Any]) -> Key:
        """What sorts a node of this kind for the pod; None where what is left on it is not known."""
        if (shape := node.shape) is None:
            return None
        if id(shape) not in self._score_needs:
            if len(self._score_needs) >= MOST_SHAPES:
                self._score_needs.clear()
            self._score_needs[id(shape)] = shape, scorer.need(shape, self.demand)
        return scorer.key(shape, self._score_needs[id(shape)][1], node.left)


class RefusedByAll(NamedTuple):
    """What nodes say to a request that none of them takes."""

    version: int
    """Of the cluster for which that is right."""
    nodes: frozenset[NodeName]
    filtered: Filtered
    counts: Counter[str]
    """Code of a refusal -> how many nodes."""


class Request:
    """What pods ask for that are alike to every node, with what each node says to it."""

    def __init__(self, pod: PodRequest) -> None:
        """`pod`: valid, under names that no pod has."""
        self.pod = pod
        self.key = msgspec.json.encode(pod, order="deterministic")
        self.codes = bytearray()
        """By the place of a node: 0 where it would admit the pod, else the number of the refusal."""
        self.version = -1
        """Of the cluster, up to which `codes` and `keys` are right."""
        self.refused_by_all: RefusedByAll | None = None
        """What was answered last, where no node was left: pods that wait ask for it again and again."""
        self.keys = NodeKeys()
        self._asked: WeakKeyDictionary[NodeKind, Asked] = WeakKeyDictionary()

    def of(self, kind: NodeKind, view: ClusterView) -> Asked:
        """What it is to the nodes of a kind. Raises InvalidField as `Asked` does."""
        asked = self._asked.get(kind)
        if asked is None:
            demand = pod_demand(self.pod, kind.rules)
            asked = self._asked[kind] = Asked(demand, need_of(kind.topology, demand), kind, view)
        return asked

    async def learn(self, kind: NodeKind, view: ClusterView, turns: Turns) -> None:
        """Does the work of `of` with turns of the event loop in between. Raises InvalidField as that does."""
        if kind in self._asked:
            return

        async def give(_: None) -> None:
            await turns.give()

        demand = pod_demand(self.pod, kind.rules)
        await turns.give()
        need = await drive_async(need_steps(kind.topology, demand), give)
        self._asked[kind] = Asked(demand, need, kind, view)

    def reset(self) -> None:
        """Nothing that was decided counts any more."""
        self.version = -1
        self.refused_by_all = None
        self._asked.clear()
        self.keys = NodeKeys()


class DecisionCache:
    """The requests of the pods that were asked about last, with their verdicts."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._pods: OrderedDict[str, tuple[PodRequest, Request]] = OrderedDict()
        """UID -> the pod as it came, and its request."""
        self._requests: OrderedDict[object, Request] = OrderedDict()
        self._resources = view.offers.names
        self.beside: Callable[[Request, NodeView], str] = lambda request, node: ""
        """Why a pod must not come to a node that would admit it: it would take the place of others; empty: it would not."""
        self.refusals = [NodeRefusal(code="")]
        """By number; 0 stands for none."""
        self._numbers: dict[NodeRefusal, int] = {}

    def request(self, pod: PodToSchedule) -> Request:
        """What a pod asks for. Raises InvalidField for a pod that cannot be meant."""
        known = self._pods.get(pod.uid)
        if known is not None and known[0] == pod.request:
            self._pods.move_to_end(pod.uid)
            return self._kept(known[1])
        request = self._kept(Request(nameless(validate_pod(pod.request))))
        self._pods[pod.uid] = pod.request, request
        if len(self._pods) > PODS_KEPT:
            self._pods.popitem(last=False)
        return request

    def codes(self, request: Request) -> bytearray:
        """By the place of each node the number of its refusal, 0 where it would admit the pod. Raises as `Asked` does."""
        view = self._view
        self._note_resources()
        if request.version < view.version:
            request.codes.extend(bytes(view.size - len(request.codes)))
            for node in view.changed_since(request.version):
                self._note(request, node)
            request.version = view.version
        return request.codes

    async def prepare(self, request: Request) -> None:
        """
        Does the work of `codes` with turns of the event loop in between: where amounts do not decide, thousands of nodes
        take seconds. Nodes are judged in the order of their changes, so that whoever comes next goes on from there.
        """
        turns = self._view.turns()
        self._note_resources()
        if request.keys.are_stale:
            request.reset()
        while request.version < self._view.version:
            for kind in {node.kind for node in self._view.changed_since(request.version) if node.kind is not None}:
                await request.learn(kind, self._view, turns)
            request.codes.extend(bytes(self._view.size - len(request.codes)))
            due = [(node.version, node) for node in self._view.changed_since(request.version)]
            if not due:  # what changed was dropped
                return
            for version, node in reversed(due):
                is_there = self._view.nodes.get(node.name) is node
                if is_there and node.version == version:  # else it comes later
                    self._note(request, node)
                request.version = version
                await turns.give()
                self._note_resources()
                if request.version != version:  # another call has judged nodes, or none of it counts any more
                    break

    def _note_resources(self) -> None:
        """What was passed over as nobody's may be a device now."""
        if self._resources != self._view.offers.names:
            self._resources = self._view.offers.names
            for each in self._requests.values():
                each.reset()

    def _note(self, request: Request, node: NodeView) -> None:
        code = self.judge(request, node)
        resolvability = self.resolvability(request, node) if code else None
        helped = resolvability is None and self._is_helped(request, node)
        request.codes[node.place] = self.number(code, helped=helped, resolvability=resolvability)
        asked = None if node.kind is None else request.of(node.kind, self._view)
        request.keys.note(node.place, None if asked is None else asked.key(node, self._view.scorer))

    def judge(self, request: Request, node: NodeView) -> str:
        """The code of a node's refusal; empty where it would admit the pod. Raises InvalidField as `Asked` does."""
        if node.refusal or node.kind is None:
            return node.refusal
        asked = request.of(node.kind, self._view)
        if asked.unlisted:
            return asked.unlisted
        code = judge_amounts(asked.need, node.free) if asked.need is not None and node.free is not None else None
        code = decided(self._view.basis(node).state, asked.demand) if code is None else code
        return code or self.beside(request, node)

    def judge_empty(self, request: Request, kind: NodeKind) -> str:
        """The same of a node of this kind that has no pods and whose devices are all healthy."""
        asked = request.of(kind, self._view)
        return asked.unlisted or asked.on_empty

    def resolvability(self, request: Request, node: NodeView) -> Resolvability | None:
        """
        Why the end of pods would not help on a node that refuses a pod: `never`, found once for all nodes of a kind if the
        pod names no GPUs, or `unhealthy`. None: it would help, or the refusal is not about what is free.
        """
        if node.refusal or node.kind is None:
            return None
        asked = request.of(node.kind, self._view)
        if asked.unlisted:
            return None
        on_empty = asked.on_empty
        if not NAMING_GPUS.isdisjoint(request.pod.annotations):
            on_empty = decided(with_healthy_devices(without_any_allocation(self._view.basis(node).state)), asked.demand)
        if on_empty in UNDECIDED:
            return None
        if on_empty:
            return Resolvability.NEVER
        if node.idle is None:
            return None
        code = judge_amounts(asked.need, node.idle) if asked.need is not None else None
        code = decided(without_any_allocation(self._view.basis(node).state), asked.demand) if code is None else code
        return Resolvability.UNHEALTHY if code and code not in UNDECIDED else None

    def number(self, code: str, *, helped: bool, resolvability: Resolvability | None = None) -> int:
        """
        The number that stands for a refusal; 0 for none. `helped`: as `NodeRefusal.helped_by_victims`; `resolvability`: as
        there.
        """
        if not code:
            return 0
        refusal = NodeRefusal(code=code, helped_by_victims=helped, resolvability=resolvability)
        number = self._numbers.get(refusal)
        if number is None:
            number = self._numbers[refusal] = len(self.refusals)
            self.refusals.append(refusal)
        return number

    def _is_helped(self, request: Request, node: NodeView) -> bool:
        """Whether the pod could fit if others were gone: the node is offered, and nothing refuses it whatever is free."""
        if node.kind is None:
            return False
        asked = request.of(node.kind, self._view)
        return not asked.unlisted and (asked.need is None or not asked.need.refused)

    def _kept(self, request: Request) -> Request:
        """The request that is kept for what this one asks for; this one where there is none."""
        kept = self._requests.setdefault(request.key, request)
        self._requests.move_to_end(request.key)
        if len(self._requests) > REQUESTS_KEPT:
            self._requests.popitem(last=False)
        return kept


def decided(state: NodeState, demand: PodDemand) -> str:
    """The code of the refusal; empty: the pod is admitted."""
    decision = decide_demand(state, demand)
    return "" if isinstance(decision, Admission) else decision.code


def empty(kind: NodeKind) -> NodeState:
    """A node of this kind on which nothing is allocated, all of it healthy. It has none of the GPUs that are known."""
    hardware = without_uuids(kind.topology)
    devices = (*hardware.gpu_by_id, *hardware.nic_by_id, *(other.id for other in hardware.others))
    return initial_state(NodeName(""), hardware, dict.fromkeys(devices, HEALTHY), "")


def unlisted(demand: PodDemand, kind: NodeKind, view: ClusterView) -> str:
    """
    Code of the refusal because of a resource that nothing lists on nodes of this kind; empty: there is none. A resource that
    no node of the cluster offers and no plugin registered is not looked at, as the kubelet passes over it; but for amounts
    of GPUs in slots, of which a pod would get all of a GPU, or none.
    """
    missing = demand.device_names - kind.topology.devices.keys() - amount_resources(kind.topology)
    if kind.registered is not None and missing & kind.registered:
        return DEVICES_UNKNOWN
    return UnknownResource.code if missing & (view.offers.names | {GPU, NIC, *USUAL_SLOTS.slots.resources}) else ""


def nameless(pod: PodRequest) -> PodRequest:
    """What a valid pod asks for, under names that say nothing, with the annotations that count."""
    return msgspec.structs.replace(
        pod,
        namespace=NAMESPACE,
        name=POD,
        annotations={key: value for key, value in pod.annotations.items() if key in COUNTING},
        init_containers=numbered("init", pod.init_containers),
        containers=numbered("app", pod.containers),
        claims=(),
    )


def numbered(group: str, containers: tuple[ContainerRequest, ...]) -> tuple[ContainerRequest, ...]:
    """The containers under the names of their places."""
    return tuple(
        msgspec.structs.replace(each, name=ContainerName(f"{group}-{place}")) for place, each in enumerate(containers)
    )
