"""
Keeps the view of the cluster for the calls of the scheduler: for each node, the state for its kubelet's next decision.

For each node of `Cluster`, the view has its eligibility, its kind (hardware and rules, without device IDs), and the
version of its last change. A node is offered to the scheduler only if its data is complete, its allocator answers, only
one allocator publishes for it, and the rules of its kubelet are known. Otherwise it refuses every pod with a code.

A node is renewed between two calls, after its facts arrive. Facts that arrive just before a call are applied in the
call. The data of a prediction (`PredictionBasis`) is large, so it is computed on demand and cached for a few nodes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import anyio
import msgspec

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.free_amounts import Free, count_free, has_more
from topoalign.core.admission.prediction import (
    KubeletUnknown,
    NodeKind,
    PredictionBasis,
    kind_key,
    prediction_basis,
)
from topoalign.core.admission.resolvability import with_healthy_devices, without_any_allocation
from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.errors import InvalidField, NoFit, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import NodeScorer, Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState
from topoalign.core.state.terminated_pods import without_pods
from topoalign.registry.cluster_nodes import Cluster, ClusterNode, bare
from topoalign.registry.scheduling.cluster_state.assumed_pods import NodePods
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.recent_dict import RecentDict
from topoalign.runtime.request_turns import TaskTurns

UNKNOWN_NODE = "UnknownNode"
"""No facts of the node were received, or Kubernetes has no such Node."""
DUPLICATE_AGENT = "DuplicateAgent"
"""Two allocators publish for the node."""
NODE_NOT_WHOLE = "NodeNotWhole"
"""The hardware, health or allocations of the node are unknown, or facts about them are missing."""
NODE_STALE = "NodeStale"
"""The allocator of the node does not answer."""
KUBELET_UNKNOWN = KubeletUnknown.code
"""The rules or the allocations of the node's kubelet are unknown."""
NOT_KNOWN = frozenset({UNKNOWN_NODE, DUPLICATE_AGENT, NODE_NOT_WHOLE, NODE_STALE, KUBELET_UNKNOWN})
"""Codes of refusals that depend on the facts that this registry has received. Other registries may not refuse."""

QUALITY = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
FEW = 16
"""Maximum number of nodes that a call renews without yielding, which takes some milliseconds."""
HELD_SECONDS = 0.005
"""Delay before a node is renewed after a pod is assumed or reserved. A bind does both, so they share one renewal."""
TERMINATED_SECONDS = 15.0
"""
How long the devices of a terminated pod count as free although the facts of the node still have them. Usually the facts
change within a second. After this time, the devices count again, because a force-deleted pod may still be running.
"""
BASES_KEPT = 128
"""Maximum number of nodes whose prediction basis is cached."""
NO_PODS = NodePods()
"""Shared by all nodes without assumed, terminating or terminated pods. Read-only."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class NodeView:
    """The state of a node for the calls of the scheduler."""

    name: NodeName
    place: int
    """Index of the node in arrays with one entry per node."""
    version: int = 0
    """The version of the cluster at its last change."""
    refusal: str = UNKNOWN_NODE
    """Code of the refusal of every pod; empty: the node is offered."""
    kind: NodeKind | None = None
    """None if the node is not offered. The same applies to `free`."""
    free: Free | None = None
    idle: Free | None = None
    """The free resources without any pod, if some devices are unhealthy or cordoned; None: all devices are usable."""
    shape: Topology | None = None
    """Its published hardware."""
    left: Any = None
    """Its free resources, for its score; None if they are unknown."""


class ClusterView:
    """The nodes by name, each with the version of its last change."""

    def __init__(
        self,
        cluster: Cluster,
        unsettled: Callable[[], Unsettled],
        clock: Clock,
        scorer: NodeScorer = QUALITY,
        *,
        foreign: Callable[[NodeName], str] = lambda node: "",
        unmanaged: Callable[[NodeName], bool] = lambda node: False,
        offered: Callable[[NodeName], None] = lambda node: None,
    ) -> None:
        """
        `unsettled` returns the uncertain nodes, from the client that folds `cluster`. `foreign`: refusal code if
        another system allocates the node's GPUs; empty: none. `unmanaged`: whether topoalign does not manage a node. It
        is then not in the view. `offered` gets each node that becomes offered or gets more free resources.
        """
        self.scorer = scorer
        self.version = 0
        """Increases with each change of a node."""
        self.nodes: dict[NodeName, NodeView] = {}
        """In the order of their versions."""
        self.places: dict[NodeName, int] = {}
        self.offers = OfferedResources()
        self.foreign = foreign
        self.reserved_on: dict[str, frozenset[NodeName]] = {}
        """UID of a reserved pod -> its nodes; several after attempts on several nodes."""
        self.nodes_with_pending: set[NodeName] = set()
        """Nodes with pods that are reserved, being bound, or bound and not reported yet."""
        self.turns = partial(TaskTurns, clock)
        """Yields to the event loop during long work on all nodes."""
        self._cluster = cluster
        self._unsettled_now = unsettled
        self._clock = clock
        self._unmanaged = unmanaged
        self._offered = offered
        self._unsettled = Unsettled(frozenset(), frozenset())
        self._pods: dict[NodeName, NodePods] = {}
        self._unassumed: set[NodeName] = set()
        """Nodes to be renewed whose free resources have increased only because a bind has failed."""
        self._labels: dict[NodeName, Mapping[str, str]] = {}
        self._deleted: set[NodeName] = set()
        self._free_places: list[int] = []
        self._kinds: WeakValueDictionary[object, NodeKind] = WeakValueDictionary()
        self._bases = RecentDict[NodeName, tuple[int, PredictionBasis]](BASES_KEPT)
        """Node -> the version of its last change, and its basis then."""
        self._due: dict[NodeName, None] = dict.fromkeys(cluster.nodes)
        """The nodes to be renewed, in the order in which they were marked."""
        self._is_due = anyio.Event()
        self._is_due_now = anyio.Event()
        """Set if a node must be renewed for more than its assumed or reserved pods."""
        self._renewed = anyio.Event()
        """Set at the next renewal of a node."""
        self._started = False
        """Whether all facts that were received before the start are applied."""
        cluster.listeners.append(self.mark)

    def mark(self, node: NodeName) -> None:
        """Marks a node for renewal."""
        self._mark_for_later(node)
        self._is_due_now.set()

    def _mark_for_later(self, node: NodeName) -> None:
        """
        Marks a node whose assumed or reserved pods changed. It is renewed after `HELD_SECONDS`, so the bind goes first.
        """
        self._due[node] = None
        self._is_due.set()

    async def run(self, behind: Callable[[], str | None], pause: float) -> None:
        """Renews nodes as facts arrive, until cancelled. Starts when `behind`, read every `pause` seconds, is None."""
        while behind() is not None:
            await self._clock.sleep(pause)
        turns = TaskTurns(self._clock)
        while True:
            self._look()
            while self._due:
                self._renew(next(iter(self._due)))
                await turns.give()
            if not self._started:
                # Copy the names so that they are adjacent in memory: looking up 5,000 scattered ones takes 50 % longer.
                names = msgspec.json.decode(msgspec.json.encode(sorted(self.places)), type=list[NodeName])
                self.places = {name: self.places[name] for name in names}
            self._started = True
            self._is_due = anyio.Event()
            self._is_due_now = anyio.Event()
            await self._is_due.wait()
            with anyio.move_on_after(HELD_SECONDS):
                await self._is_due_now.wait()

    def waiting(self) -> str | None:
        """Readiness: why nodes are not evaluated yet; None: all are evaluated."""
        return None if self._started else f"{len(self._due)} nodes are not evaluated yet"

    def is_behind(self) -> bool:
        """Whether `renew` would renew more than `FEW` nodes."""
        self._look()
        return len(self._due) > FEW

    async def catch_up(self) -> None:
        """Does most of the work of `renew`, and yields to the event loop; a few nodes may remain."""
        turns = self.turns()
        while self.is_behind():
            for node in tuple(self._due):
                if node in self._due:  # not renewed in the meantime
                    self._renew(node)
                    await turns.give()

    def renew(self) -> None:
        """Applies all received facts."""
        self._look()
        while self._due:
            self._renew(next(iter(self._due)))

    @property
    def size(self) -> int:
        """The highest place plus one."""
        return len(self.nodes) + len(self._free_places)

    def changed_since(self, version: int) -> Iterator[NodeView]:
        """The nodes that changed after this version, the latest first."""
        for node in reversed(self.nodes.values()):
            if node.version <= version:
                return
            yield node

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def version_of(self, node: NodeName) -> int:
        """The version of the node's last change; 0: the node is unknown."""
        view = self.nodes.get(node)
        return 0 if view is None else view.version

    async def until_changed(self, node: NodeName, version: int) -> None:
        """Waits until the version of the node differs from this version."""
        while self.version_of(node) == version:
            await self._renewed.wait()

    def _notify_renewed(self) -> None:
        self._renewed.set()
        self._renewed = anyio.Event()

    def reserve(self, node: NodeName, reservations: Sequence[Reservation]) -> None:
        """Replaces the reserved pods of the node."""
        pods = self._pods.setdefault(node, NodePods())
        before = tuple(pods.reserved)
        if pods.reserve(reservations):
            for uid in before:
                self._end_reserved(uid, node)
            for uid in pods.reserved:
                self.reserved_on[uid] = self.reserved_on.get(uid, frozenset()) | {node}
            self._mark_for_later(node)
        self._drop_empty(node)

    def expect(self, node: NodeName, pod: PodToSchedule) -> None:
        """Adds a pod that is bound to the node, in the order of binding. No effect on a known or reserved pod."""
        if self._pods.setdefault(node, NodePods()).expect(pod):
            self.mark(node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """Adds a pod whose bind to the node has begun. It holds its predicted devices until `unassume`."""
        if self._pods.setdefault(node, NodePods()).assume(pod):
            self._mark_for_later(node)

    def unassume(self, node: NodeName, pod_uid: str) -> None:
        """Removes an assumed pod after its bind."""
        if node not in self._pods:
            return
        if self._pods[node].unassume(pod_uid):
            # This must not requeue pods: after a failed bind, kube-scheduler retries pending pods by itself.
            self._unassumed.add(node)
            self.mark(node)
        self._drop_empty(node)

    def end(self, node: NodeName, pod_uid: str) -> None:
        """Removes a terminated or refused pod. Its devices in the facts count as free for `TERMINATED_SECONDS`."""
        self._end_reserved(pod_uid, node)
        if node not in self._pods:
            return
        if self._pods[node].end(pod_uid, self._clock.monotonic() + TERMINATED_SECONDS):
            self.mark(node)
        self._drop_empty(node)

    def begin_termination(self, node: NodeName, pod_uid: str) -> None:
        """Records that a pod of the node is being deleted."""
        self._pods.setdefault(node, NodePods()).terminating.add(pod_uid)

    def terminating(self, node: NodeName) -> frozenset[str]:
        """UIDs of the pods of the node that are being deleted and still exist."""
        return frozenset(self.pods_on(node).terminating)

    def terminated(self, node: NodeName) -> tuple[str, ...]:
        """UIDs of the terminated pods of the node whose devices are still in its facts."""
        return self.pods_on(node).terminated_in(self.facts(node)) if node in self._cluster else ()

    def expire_terminated(self) -> None:
        """Counts devices of pods that terminated `TERMINATED_SECONDS` ago again if the facts still have them."""
        for node, pods in list(self._pods.items()):
            if pods.terminated and pods.expire(self._clock.monotonic()):
                self.mark(node)
                self._drop_empty(node)

    def _drop_empty(self, node: NodeName) -> None:
        pods = self._pods[node]
        if pods.is_empty and not pods.terminating and not pods.terminated:
            del self._pods[node]

    def _end_reserved(self, uid: str, node: NodeName) -> None:
        if others := self.reserved_on.pop(uid, frozenset()) - {node}:
            self.reserved_on[uid] = others

    def pods_on(self, node: NodeName) -> NodePods:
        """The assumed and terminated pods of a node. Do not change them."""
        return self._pods.get(node, NO_PODS)

    def labels(self, node: NodeName) -> Mapping[str, str]:
        """The labels of its Kubernetes Node; empty: unknown."""
        return self._labels.get(node, {})

    def label(self, node: NodeName, labels: Mapping[str, str]) -> None:
        """Records a Kubernetes Node with these labels."""
        self._labels[node] = dict(labels)
        if node in self._deleted:
            self._deleted.remove(node)
            self.mark(node)

    def forget(self, node: NodeName) -> None:
        """Records the deletion of a Kubernetes Node. The node is not offered until `label` is called again."""
        # Its pods remain assumed, because a kubelet that registers its Node again still has them.
        self._labels.pop(node, None)
        self._deleted.add(node)
        self.mark(node)

    def basis(self, node: NodeView) -> PredictionBasis:
        """The data of predictions for an offered node, with its assumed pods."""
        kept = self._bases.get(node.name)
        if kept is None or kept[0] != node.version:
            kept = node.version, self.basis_of(self.facts(node.name))
        self._bases[node.name] = kept
        return kept[1]

    def basis_of(
        self, state: NodeState, without: frozenset[str] = frozenset(), *, settle: bool = False
    ) -> PredictionBasis:
        """
        The data of predictions for these facts of a node, with its assumed pods. `without`: UIDs of pods that count as
        deleted. `settle`: whether to update the assumed pods, because these are the current facts. Raises
        KubeletUnknown, and InvalidField for rules that no kubelet accepts.
        """
        pods = self.pods_on(state.node)
        basis = prediction_basis(bare(pods.without_terminated(state)), self._clock.wall())
        check_rules(basis.rules)
        if pods.is_empty:
            return basis
        if settle:
            pods.settle(state, basis.state, basis.rules)
        return msgspec.structs.replace(basis, state=pods.added_to(basis.state, basis.rules, without))

    def facts(self, node: NodeName) -> NodeState:
        """The state of a node according to its facts. Raises NotFound."""
        return self._cluster.member(node).state

    def facts_without(self, node: NodeName, uids: frozenset[str]) -> NodeState:
        """Same as `facts`, without these pods."""
        return without_pods(self.facts(node), uids, self.pods_on(node).names_of(uids))

    def _look(self) -> None:
        """Marks nodes whose allocations have become certain or uncertain without a new fact."""
        had = self._unsettled
        self._unsettled = self._unsettled_now()
        for before, now in zip(had, self._unsettled, strict=True):
            self._due.update(dict.fromkeys(sorted(before ^ now)))

    def _renew(self, node: NodeName) -> None:
        del self._due[node]
        if node not in self._cluster or node in self._deleted or self._unmanaged(node):
            self._drop(node)
            return
        self.version += 1
        self._notify_renewed()
        view = self.nodes.pop(node, None)
        if view is None:
            self.places[node] = self._free_places.pop() if self._free_places else len(self.nodes)
            view = NodeView(node, self.places[node])
        self.nodes[node] = view
        view.version = self.version
        before = view.free
        self._judge(view)
        is_quiet = node in self._unassumed
        self._unassumed.discard(node)
        if view.free is not None and not is_quiet and (before is None or has_more(view.free, before)):
            self._offered(node)

    def _judge(self, view: NodeView) -> None:
        """Computes whether the node is offered, and its kind."""
        member = self._cluster.member(view.name)
        self.offers.note(view.name, member.state.hardware, member.state.usage)
        self.nodes_with_pending.discard(view.name)
        view.kind = view.free = view.idle = view.shape = view.left = None
        view.refusal = self.foreign(view.name) or obstacle(member, self._unsettled)
        if view.refusal:
            return
        usage = member.state.usage
        if usage is None or usage.kubelet is None or usage.kubelet.rules.unknown:
            view.refusal = KUBELET_UNKNOWN
            return
        try:
            basis = self.basis_of(member.state, settle=True)
        except (Unavailable, InvalidField):
            view.refusal = KUBELET_UNKNOWN
            return
        if self.pods_on(view.name).pending:
            self.nodes_with_pending.add(view.name)
        hardware = basis.state.hardware
        view.kind = self._kinds.setdefault(kind_key(basis), NodeKind(hardware, basis.rules, basis.registered))
        view.free = count_free(basis.state, basis.rules)
        if with_healthy_devices(basis.state) is not basis.state:
            view.idle = count_free(without_any_allocation(basis.state), basis.rules)
        with suppress(NoFit):
            view.left = self.scorer.left(basis.state, basis.rules)
            view.shape = member.state.hardware.shape

    def _drop(self, node: NodeName) -> None:
        self.offers.drop(node)
        view = self.nodes.pop(node, None)
        if node not in self._cluster:
            self._deleted.discard(node)
        if view is None:
            return
        self.version += 1
        self._notify_renewed()
        self._free_places.append(self.places.pop(node))
        self._bases.pop(node, None)
        self.nodes_with_pending.discard(node)


def obstacle(member: ClusterNode, unsettled: Unsettled) -> str:
    """Returns the code with which the node refuses every pod, unless it is `KubeletUnknown`; empty: there is none."""
    state = member.state
    if state.node in unsettled.duplicate_agents:
        return DUPLICATE_AGENT
    if state.topology is None or state.health is None or not state.epoch or state.node in unsettled.incomplete:
        return NODE_NOT_WHOLE
    return "" if member.answering else NODE_STALE
