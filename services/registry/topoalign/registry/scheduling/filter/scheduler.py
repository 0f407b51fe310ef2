"""
Answers kube-scheduler's filter, prioritize and preempt calls from the view of the cluster.

These calls do not change the view. A node that is not in the view is judged by a template (`node_templates`).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Protocol

import msgspec

from topoalign.core.demand.share_annotations import uuid_selection
from topoalign.core.model.errors import InvalidField, NoFit, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import GANG, Compat, PodRequest
from topoalign.core.sharing.pod_checks import Offers, check_gpus_known, check_pod
from topoalign.core.sharing.pod_warnings import warnings_of
from topoalign.core.sharing.quota_amounts import OverQuota
from topoalign.registry.ports import NotReadYet
from topoalign.registry.scheduling.cluster_state.assumed_pods import (
    Requested,
    devices_of_unknown_containers,
)
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.cluster_state.view import UNKNOWN_NODE, ClusterView
from topoalign.registry.scheduling.filter.admission_order import all_fit, are_ambiguous, are_too_many, fit_as_equals
from topoalign.registry.scheduling.filter.decision_cache import (
    DecisionCache,
    PodClass,
    PodClasses,
    RefusedByAll,
    decide_code,
)
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas, quota_has_room
from topoalign.registry.scheduling.filter.node_templates import NewNodes
from topoalign.registry.scheduling.filter.pending_pods import PlannedPods, WaitingPods, later_than, pending_pod
from topoalign.registry.scheduling.scheduling_api import PODS_PENDING, Filtered, PodToSchedule, Victims
from topoalign.runtime.recent_dict import RecentDict

PODS_KEPT = 4_096
"""Maximum number of pods whose result is cached. Pending pods are checked repeatedly."""


class PodChecks:
    """Finds pods that are invalid on every node. The webhook denies them, and the filter refuses them on every node."""

    def __init__(self, offers: OfferedResources) -> None:
        self._offers = offers
        self._known = RecentDict[str, tuple[PodRequest, object, InvalidField | NoFit | None]](PODS_KEPT)
        """UID -> the pod, the offers at that time, and the error."""

    @property
    def _compat(self) -> Compat:
        """The compat mode for checks of all nodes with slots. HAMi's rules accept all pods that topoalign's accept."""
        return "hami" if "hami" in self._offers.compats else ""

    def check(self, request: PodRequest) -> None:
        """Raises the errors of `check_pod` for nodes where the kubelet decides, and those of `check_gpus_known`."""
        offered = self._offers
        offers = Offers(offered.units, offered.slots, offered.not_in_slots)
        demand = check_pod(request, offers, self._compat, by_kubelet=True)
        check_gpus_known(demand, offered.gpus, offers)

    def warnings(self, annotations: Mapping[str, str], limits: Mapping[ResourceName, str]) -> tuple[str, ...]:
        """Returns warnings about probable mistakes in a pod (`warnings_of`)."""
        return warnings_of(annotations, limits, self._offers.names)

    def check_waiting(self, pod: PodToSchedule) -> None:
        """Same as `check`, for a pending pod. Caches the result."""
        offers = self._offers
        has_named_gpu = not offers.gpus.isdisjoint(uuid_selection(pod.request.annotations).wanted or ())
        offered = offers.units, offers.slots, offers.not_in_slots, self._compat, has_named_gpu
        known = self._known.get(pod.uid)
        if known is None or known[0] != pod.request or known[1] != offered:  # a new status leaves the request equal
            failure: InvalidField | NoFit | None = None
            try:
                self.check(pod.request)
            except (InvalidField, NoFit) as error:
                failure = error
            known = pod.request, offered, failure
        self._known[pod.uid] = known
        if known[2] is not None:
            raise known[2].with_traceback(None)


PLANNED_ELSEWHERE = "PlannedElsewhere"
"""The pod is planned on another node, with its gang."""
NOMINATED_KEPT = 1_024
"""Maximum number of pods for which the first refusal by their nominated node is kept."""
NOMINATED_SECONDS = 15.0
"""How long a nominated node can continue to report its victims' devices. After that, it refuses the pod as usual."""
GANGS_KEPT = 256
"""Maximum number of pod classes of gangs whose candidate nodes are kept."""


class VictimsTerminating(Unavailable):
    """
    Raised for a pod that has preempted other pods on a node, while the node still reports them. A refusal would start
    another preemption. An error does not (kube-scheduler v1.36).
    """

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"node {clean(node)} still reports pods that were preempted for the pod",
            "the scheduler tries again",
        )


BestNodes = Callable[[PodToSchedule, NodeName | None], Awaitable[Sequence[NodeName]]]
"""The function `Scheduler.best`: returns the nodes that would admit a pod now, the best first."""


class GangPlans(Protocol):
    """The plans of gangs whose devices are not reserved yet (`binding.gang_binding`)."""

    async def plan_ahead(self, best: BestNodes, pod: PodToSchedule, version: int) -> None:
        """Plans the gang of a pod."""

    def node_ahead(self, uid: str) -> NodeName | None:
        """The node of a pod by the plan of its gang; None: there is no plan."""

    def drop(self, uid: str) -> bool:
        """Removes the pod from the plan of its gang. Returns whether it was in it."""


class Scheduler:
    """Answers the calls of kube-scheduler for one cluster."""

    def __init__(
        self,
        view: ClusterView,
        behind: Callable[[], str | None] = lambda: None,
        *,
        planned: Callable[[str], NodeName | None] = lambda uid: None,
        plans: GangPlans | None = None,
        allows: Callable[[PodToSchedule, NodeName], bool] = lambda pod, node: True,
        passes: Callable[[PodToSchedule, NodeName], bool] = lambda pod, node: False,
        requested: Requested = lambda reserved: None,
        refused: Callable[[PodToSchedule, Counter[str]], None] = lambda pod, counts: None,
        quotas: Quotas | None = None,
    ) -> None:
        """
        `behind`: why data that the answers need is missing; None: no data is missing. `planned`: UID of a pod -> its
        node, if devices are reserved for its gang. `plans`: the plans of other gangs; None: there are none. `allows`:
        whether Kubernetes' own filters accept the node for the pod. `passes`: whether the filter passes the node because
        topoalign does not manage it. `requested`: the request of a reserved pod. `refused` is called with each pod that
        all nodes of a call refuse, and with the number of nodes for each `NodeRefusal.label`. `quotas`: None if the
        registry has no access to Kubernetes.
        """
        self.view = view
        self.passes = passes
        self.checks = PodChecks(view.offers)
        """Refuses invalid pods."""
        self.behind = behind
        self._planned_node = planned
        self._plans = plans
        self.allows = allows
        self._requested = requested
        self._refused = refused
        self.quotas = quotas
        self._classes = PodClasses()
        self._planned = PlannedPods(view, self._classes.of, requested)
        self._decisions = DecisionCache(view, self._classes, self._planned.refusal)
        self.lone = WaitingPods(view, self._classes.of)
        """Checks pods on nodes without other pending pods."""
        self._asked = RecentDict[object, Sequence[NodeName]](GANGS_KEPT)
        """Gang, pod class and constraints -> the nodes of the last call. Kube-scheduler's other filters passed them."""
        self._nominated = RecentDict[tuple[str, NodeName], float](NOMINATED_KEPT)
        """UID of a pod and its nominated node -> monotonic second of its first refusal there."""

    async def prepare(self, pod: PodToSchedule) -> None:
        """Does the long work of `filter` and `prioritize`, yielding to the event loop. Raises errors of `filter`."""
        turns = self.view.turns()
        while True:
            await self.view.catch_up()
            request = self._request(pod)
            await turns.give()
            await self._decisions.prepare(request)
            if not self.view.is_behind():
                return

    async def plan_and_filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        """Plans the gang of the pod, then answers as `filter`. Raises its errors and those of `GangPlans.plan_ahead`."""
        await self.prepare(pod)
        if self._plans is None or not pod.request.names_a_gang or len(nodes) == 1:  # one node: the nominated one
            return self.filter(pod, nodes, labels)
        self._note_asked(pod, self._request(pod), nodes)
        for _ in range(2):
            unplanned: NoFit | None = None
            try:
                await self._plans.plan_ahead(self.best, pod, self.view.version)
            except NoFit as error:
                unplanned = error
            await self.prepare(pod)
            filtered = self.filter(pod, nodes, labels)
            if unplanned is not None and filtered.passed:  # otherwise the refusals of the nodes say more
                raise unplanned
            # If the planned node no longer admits the pod, it is planned once more.
            if filtered.passed or not self._plans.drop(pod.uid):
                break
        return filtered

    def filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        """
        Returns which of these nodes would admit the pod. `labels`: the labels of nodes that were sent as full objects;
        they determine the template of an unknown node. Raises NotReadYet, and InvalidField for an invalid pod.
        """
        request = self._request(pod)
        self._note_asked(pod, request, nodes)
        return self._filter(pod, request, nodes, self._planned_or_ahead(pod.uid), labels)

    def _planned_or_ahead(self, uid: str) -> NodeName | None:
        planned = self._planned_node(uid)
        return self._plans.node_ahead(uid) if planned is None and self._plans is not None else planned

    def _note_asked(self, pod: PodToSchedule, request: PodClass, nodes: Sequence[NodeName]) -> None:
        if pod.request.names_a_gang and len(nodes) > 1:  # a single node may be the nominated one
            known = self.view.nodes  # store the name objects of the view, not copies
            self._asked[key_of_gang(pod, request)] = tuple(known[node].name for node in nodes if node in known)

    def _filter(
        self,
        pod: PodToSchedule,
        request: PodClass,
        nodes: Sequence[NodeName],
        planned: NodeName | None,
        labels: Mapping[NodeName, Mapping[str, str]] = {},
    ) -> Filtered:
        codes = self._decisions.codes(request)
        places = self.view.places
        refusals = self._decisions.refusals
        own = self.view.reserved_on.get(pod.uid)
        leaving = () if pod.nominated is None else self.view.terminating(pod.nominated)
        full = frozenset[NodeName]() if self.quotas is None else self.quotas.full_on(pod, nodes, leaving)
        # Whether the result is the same for equal pods. Otherwise it is valid only for this pod, and not cached.
        repeated = not (own or full) and planned is None and pod.nominated is None
        known = request.refused_by_all
        if repeated and known is not None and known.version == self.view.version and known.nodes == frozenset(nodes):
            self._refused(pod, known.counts)
            return known.filtered
        try:
            numbers = bytearray(map(codes.__getitem__, map(places.__getitem__, nodes)))
        except KeyError:
            repeated = False
            new = NewNodes(self.view, self._decisions, request, partial(self.passes, pod))
            numbers = bytearray(
                codes[places[node]] if node in places else new.number(node, labels.get(node, {})) for node in nodes
            )
        if own or planned is not None or full:
            reserved = {
                node: self._decisions.number(self._judge_without(request, node, frozenset({pod.uid})), helped=True)
                for node in (own or frozenset()).intersection(nodes)
            }
            elsewhere = self._decisions.number(PLANNED_ELSEWHERE, helped=False)
            over = [self._decisions.number(OverQuota.code, helped=helped) for helped in (False, True)]
            for place, node in enumerate(nodes):
                number = reserved.get(node, numbers[place]) if planned in (None, node) else elsewhere
                # The quota takes precedence: missing resources of the node may become free before the quota has room.
                is_helped = number > 0 and refusals[number].helped_by_victims
                numbers[place] = over[is_helped] if node in full else number
        if pod.nominated is not None and pod.nominated in nodes and pod.nominated not in full:
            place = nodes.index(pod.nominated)
            numbers[place] = self._number_of_nominated(pod, request, pod.nominated, numbers[place])
        if numbers.count(0) == len(numbers):
            return Filtered(passed=nodes, refused={})
        refused = dict(zip(compress(nodes, numbers), map(refusals.__getitem__, filter(None, numbers)), strict=True))
        filtered = Filtered(passed=tuple(compress(nodes, map(not_, numbers))), refused=refused)
        if not filtered.passed:
            by_label = Counter[str]()
            for number, count in Counter(numbers).items():
                by_label[refusals[number].label] += count
            self._refused(pod, by_label)
            if repeated:
                request.refused_by_all = RefusedByAll(self.view.version, frozenset(refused), filtered, by_label)
        return filtered

    def _number_of_nominated(self, pod: PodToSchedule, request: PodClass, node: NodeName, number: int) -> int:
        """The number of the nominated node's refusal. Raises VictimsTerminating while it may still report victims."""
        if not number or not self._decisions.refusals[number].helped_by_victims:
            self._nominated.pop((pod.uid, node), None)
            return number
        # Pods that are being deleted count as ended, as in preempt.
        if self.view.terminating(node):
            number = self._decisions.number(
                self._refusal_without(pod, request, node, self.view.terminating(node)), helped=True
            )
        if not number:
            self._nominated.pop((pod.uid, node), None)
            return number
        if (pod.uid, node) not in self._nominated:
            self._nominated[pod.uid, node] = self.view.now
        if self.view.now < self._nominated[pod.uid, node] + NOMINATED_SECONDS:
            raise VictimsTerminating(node)
        return number

    def prioritize(self, pod: PodToSchedule, nodes: Sequence[NodeName]) -> Sequence[int]:
        """
        Returns a score from 0 to 10 for each node; 0 for a node that is unknown or not offered to the scheduler, and
        for a node where a bind of the pod had to wait. Raises the errors of `filter`.
        """
        request = self._request(pod)
        self._decisions.codes(request)
        return request.keys.scores_among(self.view, nodes, self.lone.last_for(pod.uid))

    async def best(self, pod: PodToSchedule, chosen: NodeName | None = None) -> Sequence[NodeName]:
        """
        Returns the nodes that would admit the pod, the best first. The candidates are the nodes that kube-scheduler's
        other filters have passed, and the node that it has `chosen` now. Yields to the event loop, as `prepare` does.
        Raises the errors of `filter`.
        """
        await self.prepare(pod)
        request = self._request(pod)
        # Only kube-scheduler knows the results of its other filters. So use the nodes of its last call for an equal pod
        # of the gang.
        asked = self._asked.get(key_of_gang(pod, request))
        if asked is None:
            asked = [node for node in self.view.nodes if self.allows(pod, node)]
        if chosen in self.view.nodes and chosen not in asked:
            asked = [*asked, chosen]
        passed = self._filter(pod, request, asked, None).passed
        scores = dict(zip(passed, self.prioritize(pod, passed), strict=True))
        return sorted(passed, key=lambda node: (-scores[node], node))

    async def preempt(self, pod: PodToSchedule, victims: Mapping[NodeName, Victims]) -> Mapping[NodeName, Victims]:
        """Returns the nodes that would admit the pod without these victims. Raises the errors of `filter`."""
        await self.view.catch_up()
        request = self._request(pod)
        turns = self.view.turns()
        helped: dict[NodeName, Victims] = {}
        for node, each in victims.items():
            await turns.give()
            self.view.renew()  # nodes may have changed or been deleted in the meantime
            passes = self.passes(pod, node) or not self._refusal_without(pod, request, node, each.uids)
            if passes and quota_has_room(self.quotas, pod, node, each.uids):
                helped[node] = each
        planned = self._planned_or_ahead(pod.uid)  # filter will refuse all other nodes in any case
        return helped if planned is None else {node: each for node, each in helped.items() if node == planned}

    async def fits_in_every_order(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        Returns the code of the reason not to bind the pod to the node now. Empty: in every order, the kubelet will
        admit the pod and all bound or reserved pods that the node has not reported yet. Raises the errors of `filter`.
        """
        await self.view.catch_up()
        request = self._request(pod)
        view = self.view.nodes.get(node)
        holds = self.view.pods_on(node)
        # The pod's own reservation and assumed pods do not count, because binds to a node reserve one after another.
        uids = frozenset({pod.uid}) | holds.assumed
        if view is not None and holds.is_empty:  # no pod is pending, and nothing is held in addition to the facts
            return self._decisions.judge(request, view) or await self.lone.refusal(node, pod)
        if view is None or view.kind is None or request.of(view.kind, self.view).unlisted:
            return self._judge_without(request, node, uids)
        facts = self.view.facts(node)
        fixed = self.view.basis_of(facts, uids | holds.uids)
        waiting = [each for each in holds.waiting(fixed.state, self._requested) if each[0].uid not in uids]
        planned = self._planned.on(view)
        moving = uids | {each.uid for each, _ in waiting} | {each.uid for each in planned}
        pending = [
            pending_pod(str(place), pod_class, pod_class.of(view.kind, self.view), must_fit=must_fit)
            for place, (each, must_fit) in enumerate(((pod, True), *waiting))
            for pod_class in (self._classes.of(each),)
        ]
        if not planned and holds.pending <= moving and fit_as_equals(fixed.state, pending):
            return ""
        code = self._judge_without(request, node, uids)
        if code:  # a container without a known owner counts in addition to the reservation of its pod
            return PODS_PENDING if devices_of_unknown_containers(facts) else code
        is_planned = any(each.uid == pod.uid for each in planned)
        if not waiting and not is_planned:
            return self._crowds(request, node, uids) or await self.lone.refusal(node, pod)
        if are_too_many(pending):
            return PODS_PENDING
        pending[0] = pending[0]._replace(may_wait=bool(waiting) or not is_planned)
        if any(are_ambiguous(fixed.state.hardware, pending[0], other) for other in pending[1:]):
            return PODS_PENDING
        later = later_than(pod.uid, planned)
        fit = await all_fit(self.view.basis_of(facts, moving).state, pending, self.view.turns(), later)
        return "" if fit else PODS_PENDING

    def check_ready(self) -> None:
        """Raises NotReadYet while data that an answer depends on is missing."""
        finding = self.behind()
        if finding is not None:
            raise NotReadYet(finding)

    def would_admit_without(self, node: NodeName, pod: PodToSchedule, uids: Collection[str]) -> bool:
        """Whether the node would admit the pod if these pods of the node were gone. Raises the errors of `filter`."""
        request = self._request(pod)
        return not self._refusal_without(pod, request, node, {*uids, *self.view.pods_on(node).assumed})

    def _refusal_without(self, pod: PodToSchedule, request: PodClass, node: NodeName, uids: Collection[str]) -> str:
        gone = frozenset((*uids, pod.uid))
        crowded = "" if self._planned_node(pod.uid) is not None else self._crowds(request, node, gone)
        return crowded or self._judge_without(request, node, gone)

    def _crowds(self, request: PodClass, node: NodeName, gone: frozenset[str]) -> str:
        view = self.view.nodes.get(node)
        return "" if view is None else self._planned.refusal(request, view, gone)

    def _request(self, pod: PodToSchedule) -> PodClass:
        """Applies all received facts. Returns the class of the pod. Raises NotReadYet and errors of `PodChecks`."""
        self.check_ready()
        self.view.renew()
        self.checks.check_waiting(pod)
        return self._classes.of(pod)

    def _judge_without(self, request: PodClass, node: NodeName, uids: frozenset[str]) -> str:
        """The code of a node's refusal without these pods; empty: it would admit the pod."""
        view = self.view.nodes.get(node)
        if view is None or view.kind is None:
            return (self.view.foreign(node) or UNKNOWN_NODE) if view is None else view.refusal
        asked = request.of(view.kind, self.view)
        if asked.unlisted:
            return asked.unlisted
        return decide_code(self.view.basis_of(self.view.facts_without(node, uids), uids).state, asked.demand)


def key_of_gang(pod: PodToSchedule, request: PodClass) -> object:
    """A key that is equal for the pods of a gang with the same request and constraints."""
    where = msgspec.json.encode(pod.constraints, order="deterministic")
    return pod.request.namespace, pod.request.annotations.get(GANG), pod.request.pod_groups, request.key, where
