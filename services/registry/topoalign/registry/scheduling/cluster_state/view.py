"""
What the kubelet of each node would decide on next: the view of the cluster that the scheduler's questions are answered from.

For each node of `Cluster` the view has whether it is offered (`standing`), its kind (hardware and rules without what is
unique to it), and the version at which this changed last. It is renewed when facts of the node come, between two questions;
only what came a moment before a question is renewed within it. A renewal costs its own node and no other.

What a prediction stands on, the `PredictionBasis`, is large and made again of the node's facts where needed; a few are kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import anyio
import msgspec

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.free_amounts import count_free, has_more
from topoalign.core.admission.kinds import NodeKind, kind_key
from topoalign.core.admission.prediction import PredictionBasis, prediction_basis
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
from topoalign.registry.cluster import Cluster, bare
from topoalign.registry.scheduling.cluster_state.assumed_pods import Hold, NodeHolds
from topoalign.registry.scheduling.cluster_state.nodes import KUBELET_UNKNOWN, NodeView, obstacle, side_by_side
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.model import PodToSchedule
from topoalign.runtime.request_turns import Turns

QUALITY = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
FEW = 16
"""Nodes that are renewed at once, which takes some milliseconds."""
HELD_SECONDS = 0.005
"""Before a node is renewed for no more than what was assumed or reserved on it: a bind does both."""
TERMINATED_SECONDS = 15.0
"""
For so long what a pod held counts as free although the node's facts still show it: a kubelet has freed it before the API
server shows the pod as terminated, and facts of the node follow within a second. A pod that was deleted by force may run on.
"""
BASES_KEPT = 128
"""Nodes of which the basis of predictions is kept."""
NOTHING_HELD = NodeHolds()
"""Of all nodes on which nothing is held: to be asked alone, never to be changed."""


class TerminatedPod(NamedTuple):
    """A pod that the API server shows as terminated, or has no longer."""

    names: frozenset[PodNames]
    """Its namespace and name, where they are known."""
    until: float
    """Monotonic seconds up to which it counts as gone, whatever the node's facts show."""


class ClusterView:
    """The nodes by name, with the version at which each changed last."""

    def __init__(
        self,
        cluster: Cluster,
        unsettled: Callable[[], Unsettled],
        clock: Clock,
        scorer: NodeScorer[Any, Any] = QUALITY,
    ) -> None:
        """`unsettled`: of the client that `cluster` is folded from. `scorer`: nodes are scored with it."""
        self.scorer = scorer
        self.version = 0
        """Rises with each change of a node."""
        self.nodes: dict[NodeName, NodeView] = {}
        self.places: dict[NodeName, int] = {}
        self.offers = OfferedResources()
        self.offered: Callable[[NodeName], None] = lambda node: None
        """Called when a node is offered that was not, or has more free than before."""
        self.foreign: Callable[[NodeName], str] = lambda node: ""
        """Code of the refusal because others give out the node's GPUs; empty: nobody does."""
        self.unmanaged: Callable[[NodeName], bool] = lambda node: False
        """Whether topoalign does not run the node (`unmanaged_nodes`): then it is not in the view."""
        self.reserved_on: dict[str, frozenset[NodeName]] = {}
        """UID of a pod -> the nodes on which something is reserved for it: several where it was tried on more than one."""
        self.nodes_with_pending: set[NodeName] = set()
        """Nodes on which pods are reserved, or bound and not shown yet."""
        self.turns = partial(Turns, clock)
        """For work on all nodes that takes long."""
        self._cluster = cluster
        self._unsettled_now = unsettled
        self._clock = clock
        self._unsettled = Unsettled(frozenset(), frozenset())
        self._holds: dict[NodeName, NodeHolds] = {}
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
        """Now: one of them is due because of more than what is reserved on it."""
        self._renewed = anyio.Event()
        """Set at the next renewal of a node."""
        self._started = False
        """Whether all that the past told of was looked at."""
        cluster.listeners.append(self.mark)

    def mark(self, node: NodeName) -> None:
        """Something that is known of this node has changed."""
        self._due[node] = None
        self._is_due.set()
        self._is_due_now.set()

    def _mark_held(self, node: NodeName) -> None:
        """What is assumed or reserved on this node has changed: its bind has other things to do first."""
        self._due[node] = None
        self._is_due.set()

    async def run(self, behind: Callable[[], str | None], pause: float) -> None:
        """Renews nodes as their facts come, for ever, once `behind`, which is asked each `pause` seconds, is None."""
        while behind() is not None:
            await self._clock.sleep(pause)
        turns = Turns(self._clock)
        while True:
            self._look()
            while self._due:
                self._renew(next(iter(self._due)))
                await turns.give()
            if not self._started:
                self.places = side_by_side(self.places)
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
        """Does the work of `renew` with turns of the event loop in between, but for a few nodes."""
        turns = self.turns()
        while self.is_behind():
            for node in tuple(self._due):
                if node in self._due:  # else it was renewed in a turn
                    self._renew(node)
                    await turns.give()

    def renew(self) -> None:
        """Everything that is known counts from now on."""
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

    def hold(self, node: NodeName, holds: Sequence[Hold]) -> None:
        """These are the pods now for which something of the node is reserved, and no other."""
        kept = self._holds.setdefault(node, NodeHolds())
        before = tuple(kept.reserved)
        if kept.reserve(holds):
            for uid in before:
                self._end_reserved(uid, node)
            for uid in kept.reserved:
                self.reserved_on[uid] = self.reserved_on.get(uid, frozenset()) | {node}
            self._mark_held(node)
        self._let_go(node)

    def expect(self, node: NodeName, pod: PodToSchedule) -> None:
        """A pod is bound to the node. Called in the order of binding; no effect again, or where it is reserved for."""
        if self._holds.setdefault(node, NodeHolds()).expect(pod):
            self.mark(node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """A pod is about to be bound to the node: until `unassume` it holds there what it will get."""
        if self._holds.setdefault(node, NodeHolds()).assume(pod):
            self._mark_held(node)

    def unassume(self, node: NodeName, pod_uid: str) -> None:
        """
        The bind of an assumed pod has ended, either way. Where it has failed, the scheduler tries waiting pods again by
        itself: that the node has more free than before wakes nobody.
        """
        if node not in self._holds:
            return
        if self._holds[node].unassume(pod_uid):
            self._unassumed.add(node)
            self.mark(node)
        self._let_go(node)

    def gone(self, node: NodeName, pod_uid: str) -> None:
        """
        A pod that was reserved for or bound to the node has terminated, is gone, or will not be admitted. What the node's
        facts show of it counts as free from now on.
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
        """A pod of the node is being deleted."""
        self._terminating.setdefault(node, set()).add(pod_uid)

    def terminating(self, node: NodeName) -> frozenset[str]:
        """UIDs of the pods of the node that are being deleted, and still there."""
        return frozenset(self._terminating.get(node, ()))

    def terminated(self, node: NodeName) -> tuple[str, ...]:
        """UIDs of the pods that have terminated on the node and that its facts still show with something."""
        ended = self._terminated.get(node)
        if not ended or node not in self._cluster:
            return ()
        state = self._cluster.member(node).state
        return tuple(uid for uid, each in ended.items() if has_anything_of(state, uid, each.names))

    def expire_terminated(self) -> None:
        """From now on the facts of a node count again for pods that have terminated `TERMINATED_SECONDS` ago."""
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

    def holds(self, node: NodeName) -> NodeHolds:
        """What is held on a node."""
        return self._holds.get(node, NOTHING_HELD)

    def labels(self, node: NodeName) -> Mapping[str, str]:
        """Those of its Kubernetes Node; empty while they are not known."""
        return self._labels.get(node, {})

    def label(self, node: NodeName, labels: Mapping[str, str]) -> None:
        """There is a Kubernetes Node of this name, with these labels."""
        self._labels[node] = dict(labels)
        if node in self._deleted:
            self._deleted.remove(node)
            self.mark(node)

    def forget(self, node: NodeName) -> None:
        """
        The Kubernetes Node was deleted: it is not offered until `label` tells of another one. What is held there stays until
        its pods are gone or their reservations end: a kubelet that registers its node again still has them.
        """
        self._labels.pop(node, None)
        self._deleted.add(node)
        self.mark(node)

    def basis(self, node: NodeView) -> PredictionBasis:
        """What predictions for an offered node stand on, with what is held there."""
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
        The same for any facts of a node. `without`: UIDs of pods that count as gone; `settle`: these facts are what the node
        shows now. Raises KubeletUnknown, and InvalidField for rules by which no kubelet starts.
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
        """The facts without what terminated pods have. A name that a bound pod has, too, may be meant for that one."""
        ended = self._terminated.get(state.node)
        if not ended:
            return state
        names = frozenset[PodNames]().union(*(each.names for each in ended.values()))
        holds = self.holds(state.node)
        return without_pods(state, ended.keys(), names - holds.names_of(holds.uids))

    def facts(self, node: NodeName) -> NodeState:
        """What a node has said. Raises NotFound."""
        return self._cluster.member(node).state

    def _look(self) -> None:
        """Which nodes are settled changes without a fact of theirs."""
        had = self._unsettled
        self._unsettled = self._unsettled_now()
        for before, now in zip(had, self._unsettled, strict=True):
            self._due.update(dict.fromkeys(sorted(before ^ now)))

    def _renew(self, node: NodeName) -> None:
        del self._due[node]
        if node not in self._cluster or node in self._deleted or self.unmanaged(node):
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
            self.offered(node)

    def _judge(self, view: NodeView) -> None:
        """Whether the node is offered, and of which kind it is."""
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
