"""
Keeps the state on which each node's kubelet would decide next: the view of the cluster for the scheduler's calls.

For each node of `Cluster` the view has its eligibility, its kind (hardware and rules without what is unique to it), and the
version of its last change. A node is renewed when its facts arrive, between two calls; only facts that arrived just before a
call are applied within it. A renewal costs only its own node.

The `PredictionBasis`, the data of a prediction, is large and computed from the node's facts on demand; a few are cached.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import anyio
import msgspec

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.free_amounts import count_free, has_more
from topoalign.core.admission.prediction import NodeKind, PredictionBasis, kind_key, prediction_basis
from topoalign.core.admission.resolvability import with_healthy_devices, without_any_allocation
from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.errors import InvalidField, NoFit, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import NodeScorer, Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reserved_parts import PodNames
from topoalign.core.state.terminated_pods import has_anything_of, without_pods
from topoalign.registry.cluster_nodes import Cluster, bare
from topoalign.registry.scheduling.cluster_state.assumed_pods import AssumedPod, AssumedPods
from topoalign.registry.scheduling.cluster_state.node_eligibility import (
    KUBELET_UNKNOWN,
    NodeView,
    obstacle,
    with_contiguous_names,
)
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.request_turns import TaskTurns

QUALITY = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
FEW = 16
"""Nodes that are renewed in one step, which takes some milliseconds."""
HELD_SECONDS = 0.005
"""Delay of a renewal after an assumption or a reservation, because a bind does both."""
TERMINATED_SECONDS = 15.0
"""
How long the devices of a terminated pod count as free although the node's facts still have them: a kubelet frees them before
the API server reports the pod as terminated, and the node's facts follow within a second. A pod that was deleted by
force may still run.
"""
BASES_KEPT = 128
"""Nodes whose prediction basis is cached."""
NOTHING_HELD = AssumedPods()
"""Shared by all nodes without assumed pods: read only."""


class TerminatedPod(NamedTuple):
    """A pod that the API server reports as terminated, or no longer has."""

    names: frozenset[PodNames]
    """Its namespace and name, if known."""
    until: float
    """Monotonic seconds up to which it counts as gone, also if the node's facts still have it."""


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
        `unsettled`: of the client that `cluster` is folded from. `scorer`: nodes are scored with it. `foreign`: the code of
        the refusal if another system allocates the node's GPUs; empty: none does. `unmanaged`: whether topoalign does not
        run the node; then it is not in the view. `offered` is called with each node that is offered and was not, or has
        more free than before.
        """
        self.scorer = scorer
        self.version = 0
        """Rises with each change of a node."""
        self.nodes: dict[NodeName, NodeView] = {}
        self.places: dict[NodeName, int] = {}
        self.offers = OfferedResources()
        self.foreign = foreign
        self.reserved_on: dict[str, frozenset[NodeName]] = {}
        """UID of a pod -> the nodes with a reservation for it: several after attempts on several nodes."""
        self.nodes_with_pending: set[NodeName] = set()
        """Nodes with pods that are reserved, or bound and not reported yet."""
        self.turns = partial(TaskTurns, clock)
        """For work on all nodes that takes long."""
        self._cluster = cluster
        self._unsettled_now = unsettled
        self._clock = clock
        self._unmanaged = unmanaged
        self._offered = offered
        self._unsettled = Unsettled(frozenset(), frozenset())
        self._holds: dict[NodeName, AssumedPods] = {}
        self._unassumed: set[NodeName] = set()
        """Nodes that have more free because the bind of a pod has failed, and are not renewed yet."""
        self._terminating: dict[NodeName, set[str]] = {}
        """Node -> UIDs of its pods that are being deleted."""
        self._terminated: dict[NodeName, dict[str, TerminatedPod]] = {}
        """Node -> UID -> a pod that has ended there."""
        self._labels: dict[NodeName, Mapping[str, str]] = {}
        self._deleted: set[NodeName] = set()
        self._free_places: list[int] = []
        self._changed: dict[NodeName, int] = {}
        """Node -> version, in the order of the versions."""
        self._kinds: WeakValueDictionary[object, NodeKind] = WeakValueDictionary()
        self._bases: OrderedDict[NodeName, tuple[int, PredictionBasis]] = OrderedDict()
        self._due: dict[NodeName, None] = dict.fromkeys(cluster.nodes)
        """The nodes that are to be renewed, in the order of their facts."""
        self._is_due = anyio.Event()
        self._is_due_now = anyio.Event()
        """Set if a node must be renewed for more than its reservations."""
        self._renewed = anyio.Event()
        """Set at the next renewal of a node."""
        self._started = False
        """Whether all facts from before the start are applied."""
        cluster.listeners.append(self.mark)

    def mark(self, node: NodeName) -> None:
        """Marks a node for renewal."""
        self._due[node] = None
        self._is_due.set()
        self._is_due_now.set()

    def _mark_held(self, node: NodeName) -> None:
        """Marks a node whose assumed or reserved pods have changed for a later renewal: its bind goes on first."""
        self._due[node] = None
        self._is_due.set()

    async def run(self, behind: Callable[[], str | None], pause: float) -> None:
        """
        Renews nodes when their facts arrive, until cancelled. Starts when `behind`, checked every `pause` seconds, is
        None.
        """
        while behind() is not None:
            await self._clock.sleep(pause)
        turns = TaskTurns(self._clock)
        while True:
            self._look()
            while self._due:
                self._renew(next(iter(self._due)))
                await turns.give()
            if not self._started:
                self.places = with_contiguous_names(self.places)
            self._started = True
            self._is_due = anyio.Event()
            self._is_due_now = anyio.Event()
            await self._is_due.wait()
            with anyio.move_on_after(HELD_SECONDS):
                await self._is_due_now.wait()

    def waiting(self) -> str | None:
        """Readiness: why not every node can be judged at once."""
        return None if self._started else f"{len(self._due)} nodes are not looked at yet"

    def is_behind(self) -> bool:
        """Whether `renew` would renew more than a few nodes at once."""
        self._look()
        return len(self._due) > FEW

    async def catch_up(self) -> None:
        """Does the work of `renew` except for a few nodes, and yields to the event loop."""
        turns = self.turns()
        while self.is_behind():
            for node in tuple(self._due):
                if node in self._due:  # else it was renewed meanwhile
                    self._renew(node)
                    await turns.give()

    def renew(self) -> None:
        """Applies all received facts."""
        self._look()
        while self._due:
            self._renew(next(iter(self._due)))

    @property
    def size(self) -> int:
        """One more than the highest place."""
        return len(self.nodes) + len(self._free_places)

    def changed_since(self, version: int) -> Iterator[NodeView]:
        """The nodes that changed after this version, the latest first."""
        for node in reversed(self._changed):
            if self._changed[node] <= version:
                return
            yield self.nodes[node]

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def version_of(self, node: NodeName) -> int:
        """The version at which the node changed last; 0: it is not known."""
        return self._changed.get(node, 0)

    async def until_changed(self, node: NodeName, version: int) -> None:
        """Until the node has changed since this version."""
        while self.version_of(node) == version:
            await self._renewed.wait()

    def _notify_renewed(self) -> None:
        self._renewed.set()
        self._renewed = anyio.Event()

    def hold(self, node: NodeName, holds: Sequence[AssumedPod]) -> None:
        """Replaces the reserved pods of the node."""
        kept = self._holds.setdefault(node, AssumedPods())
        before = tuple(kept.reserved)
        if kept.reserve(holds):
            for uid in before:
                self._end_reserved(uid, node)
            for uid in kept.reserved:
                self.reserved_on[uid] = self.reserved_on.get(uid, frozenset()) | {node}
            self._mark_held(node)
        self._let_go(node)

    def expect(self, node: NodeName, pod: PodToSchedule) -> None:
        """Adds a pod bound to the node, in the order of binding. No effect if it is known or reserved."""
        if self._holds.setdefault(node, AssumedPods()).expect(pod):
            self.mark(node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """Adds a pod whose bind to the node has begun; it holds its predicted devices until `unassume`."""
        if self._holds.setdefault(node, AssumedPods()).assume(pod):
            self._mark_held(node)

    def unassume(self, node: NodeName, pod_uid: str) -> None:
        """
        Removes an assumed pod after its bind. After a failed bind the scheduler retries waiting pods by itself, so the freed
        resources of the node trigger no requeue.
        """
        if node not in self._holds:
            return
        if self._holds[node].unassume(pod_uid):
            self._unassumed.add(node)
            self.mark(node)
        self._let_go(node)

    def gone(self, node: NodeName, pod_uid: str) -> None:
        """
        Takes a pod of the node that has terminated, was deleted, or will not be admitted. Its devices in the node's facts
        count as free from now on.
        """
        self._end_reserved(pod_uid, node)
        self._end_terminating(node, pod_uid)
        names = self.holds(node).names_of({pod_uid})
        if node not in self._holds or not self._holds[node].end(pod_uid):
            return
        self._let_go(node)
        until = self._clock.monotonic() + TERMINATED_SECONDS
        self._terminated.setdefault(node, {})[pod_uid] = TerminatedPod(names, until)
        self.mark(node)

    def begin_termination(self, node: NodeName, pod_uid: str) -> None:
        """Takes a pod of the node that is being deleted."""
        self._terminating.setdefault(node, set()).add(pod_uid)

    def terminating(self, node: NodeName) -> frozenset[str]:
        """UIDs of the pods of the node that are being deleted, and still there."""
        return frozenset(self._terminating.get(node, ()))

    def terminated(self, node: NodeName) -> tuple[str, ...]:
        """UIDs of the terminated pods of the node that its facts still have."""
        ended = self._terminated.get(node)
        if not ended or node not in self._cluster:
            return ()
        state = self._cluster.member(node).state
        return tuple(uid for uid, each in ended.items() if has_anything_of(state, uid, each.names))

    def expire_terminated(self) -> None:
        """Lets facts count again for pods that terminated `TERMINATED_SECONDS` ago."""
        now = self._clock.monotonic()
        for node, ended in list(self._terminated.items()):
            over = [uid for uid, each in ended.items() if each.until <= now]
            for uid in over:
                del ended[uid]
            if over:
                self.mark(node)
            if not ended:
                del self._terminated[node]

    def _end_terminating(self, node: NodeName, pod_uid: str) -> None:
        here = self._terminating.get(node, set())
        here.discard(pod_uid)
        if not here:
            self._terminating.pop(node, None)

    def _let_go(self, node: NodeName) -> None:
        if self._holds[node].is_empty:
            del self._holds[node]

    def _end_reserved(self, uid: str, node: NodeName) -> None:
        if left := self.reserved_on.pop(uid, frozenset()) - {node}:
            self.reserved_on[uid] = left

    def holds(self, node: NodeName) -> AssumedPods:
        """Returns the assumed pods of a node."""
        return self._holds.get(node, NOTHING_HELD)

    def labels(self, node: NodeName) -> Mapping[str, str]:
        """Those of its Kubernetes Node; empty while they are not known."""
        return self._labels.get(node, {})

    def label(self, node: NodeName, labels: Mapping[str, str]) -> None:
        """Takes a Kubernetes Node with these labels."""
        self._labels[node] = dict(labels)
        if node in self._deleted:
            self._deleted.remove(node)
            self.mark(node)

    def forget(self, node: NodeName) -> None:
        """
        Takes the deletion of a Kubernetes Node: it is not offered until `label` is called again. Its assumed pods stay until
        they are deleted or their reservations end, because a kubelet that registers its node again still has them.
        """
        self._labels.pop(node, None)
        self._deleted.add(node)
        self.mark(node)

    def basis(self, node: NodeView) -> PredictionBasis:
        """Returns the data of predictions for an offered node, with its assumed pods."""
        kept = self._bases.get(node.name)
        if kept is None or kept[0] != node.version:
            kept = node.version, self.basis_of(self._cluster.member(node.name).state)
            self._bases[node.name] = kept
        self._bases.move_to_end(node.name)
        if len(self._bases) > BASES_KEPT:
            self._bases.popitem(last=False)
        return kept[1]

    def basis_of(
        self, state: NodeState, without: frozenset[str] = frozenset(), *, settle: bool = False
    ) -> PredictionBasis:
        """
        Returns the data of predictions for any facts of a node. `without`: UIDs of pods that count as gone; `settle`: these
        are the node's current facts. Raises KubeletUnknown, and InvalidField for rules that no kubelet accepts.
        """
        basis = prediction_basis(bare(self._without_terminated(state)), self._clock.wall())
        check_rules(basis.rules)
        holds = self._holds.get(state.node)
        if holds is None:
            return basis
        if settle:
            holds.settle(state, basis.state, basis.rules)
        return msgspec.structs.replace(basis, state=holds.added_to(basis.state, basis.rules, without))

    def _without_terminated(self, state: NodeState) -> NodeState:
        """Returns the facts without terminated pods. A name that a bound pod also has may be that pod's."""
        ended = self._terminated.get(state.node)
        if not ended:
            return state
        names = frozenset[PodNames]().union(*(each.names for each in ended.values()))
        holds = self.holds(state.node)
        return without_pods(state, ended.keys(), names - holds.names_of(holds.uids))

    def facts(self, node: NodeName) -> NodeState:
        """Returns the state of a node by its facts. Raises NotFound."""
        return self._cluster.member(node).state

    def _look(self) -> None:
        """Marks nodes whose settling has changed, which needs no fact of theirs."""
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
        view = self.nodes.get(node)
        if view is None:
            place = self._free_places.pop() if self._free_places else len(self.nodes)
            view = self.nodes[node] = NodeView(node, place)
            self.places[node] = place
        self._changed.pop(node, None)
        self._changed[node] = view.version = self.version
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
        if self.holds(view.name).pending:
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
        self._changed.pop(node)
        self._bases.pop(node, None)
        self.nodes_with_pending.discard(node)
