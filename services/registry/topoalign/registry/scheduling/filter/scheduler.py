"""
The scheduler's questions about a pod, answered from the view of the cluster: filter, prioritize, preempt.

Nothing here has an effect on the view. A node that the registry does not know is judged by what its labels say it will be:
the machine of `topoalign.io/machine`, or an empty sibling of the same instance type, under the rules of a sibling's kubelet.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Protocol

import msgspec

from topoalign.core.demand.share_annotations import uuid_selection
from topoalign.core.model.errors import InvalidField, NoFit, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import GANG, Compat, PodRequest
from topoalign.core.scoring.scorers import HamiScorer
from topoalign.core.sharing.pod_checks import check_gpus_known, check_pod
from topoalign.core.sharing.pod_warnings import warnings_of
from topoalign.core.sharing.quota_amounts import OverQuota
from topoalign.core.state.terminated_pods import without_pods
from topoalign.registry.scheduling.cluster_state.assumed_pods import Requested
from topoalign.registry.scheduling.cluster_state.nodes import UNKNOWN_NODE
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.admission_order import all_fit, are_mistakable, are_too_many, fit_as_equals
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, RefusedByAll, Request, decided
from topoalign.registry.scheduling.filter.node_templates import NewNodes
from topoalign.registry.scheduling.filter.pending_pods import PlannedPods, WaitingPods, later_than
from topoalign.registry.scheduling.filter.quotas import Quotas, has_room
from topoalign.registry.scheduling.model import PODS_PENDING, Filtered, PodToSchedule, Victims

# Whether a pod can be meant in this cluster: what the webhook denies, and the filter refuses on all nodes alike.


PODS_KEPT = 4_096
"""Pods of which the answer is kept: those that wait are asked about again and again."""


class PodChecks:
    """Judges pods by what the nodes offer."""

    def __init__(self, offers: OfferedResources, *, ranks_as_hami: bool = False) -> None:
        """`ranks_as_hami`: whether a pod's policy of HAMi ranks the nodes for it."""
        self._offers = offers
        self._ranks_as_hami = ranks_as_hami
        self._known: OrderedDict[str, tuple[PodRequest, object, InvalidField | NoFit | None]] = OrderedDict()
        """UID -> the pod as it came, what was offered then, and why it cannot be meant."""

    @property
    def _compat(self) -> Compat:
        """As for a pod that may come to any node with slots: HAMi's reading takes all that topoalign's does."""
        return "hami" if "hami" in self._offers.compats else ""

    def check(self, request: PodRequest) -> None:
        """Raises what `check_pod` of the core does: a kubelet decides on every node of Kubernetes."""
        offers = self._offers
        check_pod(request, offers.units, offers.slots, self._compat, otherwise=offers.not_in_slots, by_kubelet=True)
        check_gpus_known(request, offers.gpus, offers.slots, offers.not_in_slots)

    def warnings(self, annotations: Mapping[str, str], limits: Mapping[ResourceName, str]) -> tuple[str, ...]:
        """What of a pod probably means something else than it says (`warnings_of`)."""
        return warnings_of(annotations, limits, self._offers.names, ranks_as_hami=self._ranks_as_hami)

    def check_waiting(self, pod: PodToSchedule) -> None:
        """The same of a pod that may come again."""
        offers = self._offers
        known = self._known.get(pod.uid)
        offered = offers.units, offers.slots, offers.not_in_slots, self._compat, self._has_known(pod.request)
        if known is None or known[0] is not pod.request or known[1] != offered:
            known = pod.request, offered, self._error(pod.request)
            self._known[pod.uid] = known
            if len(self._known) > PODS_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(pod.uid)
        if known[2] is not None:
            raise known[2].with_traceback(None)

    def _has_known(self, request: PodRequest) -> bool:
        """Whether some node has a GPU that is named as one to be used."""
        return not self._offers.gpus.isdisjoint(uuid_selection(request.annotations).wanted or ())

    def _error(self, request: PodRequest) -> InvalidField | NoFit | None:
        try:
            self.check(request)
        except (InvalidField, NoFit) as error:
            return error
        return None


PLANNED_ELSEWHERE = "PlannedElsewhere"
"""The pods of a gang are planned together, and this one to another node."""
NOMINATED_KEPT = 1_024
"""Pods with a nominated node that refused them."""
NOMINATED_SECONDS = 15.0
"""For so long a nominated node may still show what the victims held; afterwards it refuses the pod as any other node."""
GANGS_KEPT = 256
"""Of which it is kept among which nodes the scheduler chose."""


class NotReadYet(Unavailable):
    """Raised while not all is known that an answer depends on: the scheduler is to ask again."""

    code = "NotReadYet"

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "wait until the registry has read what the nodes have said; /readyz tells when")


class NoKubernetes(Unavailable):
    """Raised for a bind where the registry has no access to Kubernetes."""

    code = "NoKubernetes"

    def __init__(self) -> None:
        super().__init__(
            "the registry does not bind pods: it has no access to Kubernetes",
            "leave bindVerb out of the scheduler's configuration, or set TOPOALIGN_KUBERNETES",
        )


class VictimsTerminating(Unavailable):
    """
    Raised for a pod that has preempted others on a node which does not show yet that they are gone. A refusal would start
    another preemption; an error does not (kube-scheduler v1.36).
    """

    code = "VictimsTerminating"

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"pods were preempted for the pod on node {clean(node)}, which does not show yet that they are gone",
            "the scheduler tries again",
        )


class Binder(Protocol):
    """Binds pods to nodes."""

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As `Scheduling.bind`."""


class Scheduler:
    """Answers for one cluster."""

    def __init__(self, view: ClusterView, behind: Callable[[], str | None] = lambda: None) -> None:
        """`behind`: why not all is known yet that an answer depends on. A refusal then would keep a pod waiting for long."""
        self.view = view
        self.binder: Binder | None = None
        """Binds pods. None: the registry has no access to Kubernetes."""
        self.planned: Callable[[str], NodeName | None] = lambda uid: None
        """UID of a pod -> the only node for it, where it is planned together with others."""
        self.allows: Callable[[PodToSchedule, NodeName], bool] = lambda pod, node: True
        """Whether Kubernetes lets the pod go to the node, where the scheduler has not said so."""
        self.passes: Callable[[PodToSchedule, NodeName], bool] = lambda pod, node: False
        """Whether the pod may go to the node because topoalign does not run it."""
        self.refused: Callable[[PodToSchedule, Counter[str]], None] = lambda pod, codes: None
        """
        Told a pod that none of the nodes takes that were asked about, with how many refuse it for each reason
        (`NodeRefusal.label`).
        """
        self.checks = PodChecks(view.offers, ranks_as_hami=isinstance(view.scorer, HamiScorer))
        """Refuses pods that cannot be meant, whatever is free."""
        self.quotas: Quotas | None = None
        """What namespaces may hold. None: the registry has no access to Kubernetes."""
        self._behind = behind
        self._decisions = DecisionCache(view)
        self._planned = PlannedPods(view, self._decisions.request)
        self._decisions.beside = self._planned.refusal
        self.lone = WaitingPods(view, self._decisions.request)
        """Pods beside which none is pending."""
        self._asked: OrderedDict[object, Sequence[NodeName]] = OrderedDict()
        """Gang and what its pod asks for, and where -> the nodes that were asked about last: others are not for it."""
        self._nominated: OrderedDict[tuple[str, NodeName], float] = OrderedDict()
        """UID of a pod and its nominated node -> monotonic second of its first refusal there."""

    @property
    def requested(self) -> Requested:
        """What a pod asks for, for which this registry or another has reserved something."""
        return self._planned.requested

    @requested.setter
    def requested(self, requested: Requested) -> None:
        """From now on this tells it."""
        self._planned.requested = requested

    async def prepare(self, pod: PodToSchedule) -> None:
        """As `Scheduling.prepare`."""
        turns = self.view.turns()
        while True:
            await self.view.catch_up()
            request = self._request(pod)
            await turns.give()
            await self._decisions.prepare(request)
            if not self.view.is_behind():
                return

    def filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        """As `Scheduling.filter`. Raises NotReadYet."""
        request = self._request(pod)
        self._note_asked(pod, request, nodes)
        return self._filter(pod, request, nodes, labels)

    def _filter(
        self,
        pod: PodToSchedule,
        request: Request,
        nodes: Sequence[NodeName],
        labels: Mapping[NodeName, Mapping[str, str]] = {},
    ) -> Filtered:
        codes = self._decisions.codes(request)
        places = self.view.places
        refusals = self._decisions.refusals
        own = self.view.reserved_on.get(pod.uid)
        planned = self.planned(pod.uid)
        repeated = own is None and planned is None and pod.nominated is None  # else the answer is this pod's alone
        if repeated and (known := refused_before(request, self.view.version, nodes)) is not None:
            self.refused(pod, known.counts)
            return known.filtered
        try:
            numbers = bytes(map(codes.__getitem__, map(places.__getitem__, nodes)))
        except KeyError:
            repeated = False
            new = NewNodes(self.view, self._decisions, request, partial(self.passes, pod))
            numbers = bytes(
                codes[places[node]] if node in places else new.number(node, labels.get(node, {})) for node in nodes
            )
        for reserved in (own or frozenset()).intersection(nodes):
            number = self._decisions.number(self._judge_without(request, reserved, frozenset({pod.uid})), helped=True)
            numbers = bytes(number if node == reserved else other for node, other in zip(nodes, numbers, strict=True))
        if planned is not None:
            other = self._decisions.number(PLANNED_ELSEWHERE, helped=False)
            numbers = bytes(number if node == planned else other for node, number in zip(nodes, numbers, strict=True))
        full = frozenset[NodeName]() if self.quotas is None else self.quotas.full_on(pod, nodes, self._leaving_for(pod))
        if full:
            over = self._decisions.number(OverQuota.code, helped=False)
            numbers = bytes(
                number or (over if node in full else 0) for node, number in zip(nodes, numbers, strict=True)
            )
            repeated = False
        if pod.nominated is not None and pod.nominated in nodes:
            place = nodes.index(pod.nominated)
            number = self._number_of_nominated(pod, request, pod.nominated, numbers[place])
            numbers = bytes((*numbers[:place], number, *numbers[place + 1 :]))
        if numbers.count(0) == len(numbers):
            return Filtered(passed=nodes, refused={})
        refused = dict(zip(compress(nodes, numbers), map(refusals.__getitem__, filter(None, numbers)), strict=True))
        filtered = Filtered(passed=tuple(compress(nodes, map(not_, numbers))), refused=refused)
        if not filtered.passed:
            told = Counter[str]()
            for number, count in Counter(numbers).items():
                told[refusals[number].label] += count
            self.refused(pod, told)
            if repeated:
                request.refused_by_all = RefusedByAll(self.view.version, frozenset(refused), filtered, told)
        return filtered

    def _number_of_nominated(self, pod: PodToSchedule, request: Request, node: NodeName, number: int) -> int:
        """
        The number of the refusal of the pod's nominated node, whose pods that are being deleted count as gone: preempt has
        judged so. Raises VictimsTerminating while it may be that the node does not show their end yet.
        """
        if not number or not self._decisions.refusals[number].helped_by_victims:
            self._nominated.pop((pod.uid, node), None)
            return number
        if self.view.terminating(node):
            number = self._decisions.number(
                self._refusal_without(pod, request, node, self.view.terminating(node)), helped=True
            )
        if not number:
            self._nominated.pop((pod.uid, node), None)
            return number
        since = self._nominated.setdefault((pod.uid, node), self.view.now)
        if len(self._nominated) > NOMINATED_KEPT:
            self._nominated.popitem(last=False)
        if self.view.now < since + NOMINATED_SECONDS:
            raise VictimsTerminating(node)
        return number

    def prioritize(self, pod: PodToSchedule, nodes: Sequence[NodeName]) -> Sequence[int]:
        """As `Scheduling.prioritize`; a node that is not known has 0, and one that comes last. Raises NotReadYet."""
        request = self._request(pod)
        self._decisions.codes(request)
        return request.keys.scores_among(self.view, nodes, self.lone.last_for(pod.uid))

    async def best(self, pod: PodToSchedule, chosen: NodeName | None = None) -> Sequence[NodeName]:
        """
        All nodes that would admit the pod, the best first. Where pods of its gang that are like it were asked about, those
        among which the scheduler chose: it alone knows all of its filters. Else those that it would ask about as far as the
        registry can tell, and the node that it has `chosen`. With turns of the event loop, as `prepare`. Raises as `filter`
        does.
        """
        await self.prepare(pod)
        request = self._request(pod)
        asked = self._asked.get(key_of_gang(pod, request))
        if asked is None:
            asked = [node for node in self.view.nodes if node == chosen or self.allows(pod, node)]
        passed = self._filter(pod, request, asked).passed
        scores = dict(zip(passed, self.prioritize(pod, passed), strict=True))
        return sorted(passed, key=lambda node: (-scores[node], node))

    async def preempt(self, pod: PodToSchedule, victims: Mapping[NodeName, Victims]) -> Mapping[NodeName, Victims]:
        """As `Scheduling.preempt`. Raises NotReadYet."""
        await self.view.catch_up()
        request = self._request(pod, quota=False)
        turns = self.view.turns()
        helped: dict[NodeName, Victims] = {}
        for node, each in victims.items():
            await turns.give()
            self.view.renew()  # nodes may have changed, or gone, in the turn
            passes = self.passes(pod, node) or not self._refusal_without(pod, request, node, each.uids)
            if passes and has_room(self.quotas, pod, node, each.uids):
                helped[node] = each
        planned = self.planned(pod.uid)  # filter will refuse all other nodes, whoever ends there
        return helped if planned is None else {node: each for node, each in helped.items() if node == planned}

    async def fits_in_every_order(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        The code of why the pod may not be bound to the node now; empty: its kubelet will admit it and all pods that are
        bound or reserved there and not shown yet, in whatever order they come. What is reserved for the pod itself does not
        count.

        Raises InvalidField and NotReadYet as `filter` does.
        """
        await self.view.catch_up()
        request = self._request(pod)
        view = self.view.nodes.get(node)
        holds = self.view.holds(node)
        uids = frozenset({pod.uid}) | holds.assumed  # binds of a node reserve one after the other
        if view is not None and holds.is_empty:  # no pod is waited for, and nothing is held beside the facts
            return self._decisions.judge(request, view) or await self.lone.refusal(node, pod)
        if view is None or view.kind is None or request.of(view.kind, self.view).unlisted:
            return self._judge_without(request, node, uids)
        facts = self.view.facts(node)
        fixed = self.view.basis_of(facts, uids | holds.uids)
        left_out = uids | holds.next_of_gang(pod.uid)
        waiting = [each for each in holds.waiting(fixed.state, self.requested) if each[0].uid not in left_out]
        planned = self._planned.on(view)
        moving = uids | {each.uid for each, _ in waiting} | {each.uid for each in planned}
        comers = [
            self._planned.pending_pod(str(place), self._decisions.request(each), view, fixed.rules, must_fit=must_fit)
            for place, (each, must_fit) in enumerate(((pod, True), *waiting))
        ]
        if not planned and holds.pending <= moving and fit_as_equals(fixed.state, comers):
            return ""
        code = self._judge_without(request, node, uids)
        if code:
            return code
        is_planned = any(each.uid == pod.uid for each in planned)
        if not waiting and not is_planned:
            return self._crowds(request, node, uids) or await self.lone.refusal(node, pod)
        if are_too_many(comers):
            return PODS_PENDING
        comers[0] = comers[0]._replace(may_wait=bool(waiting) or not is_planned)
        if any(are_mistakable(fixed.state.hardware, comers[0], other) for other in comers[1:]):
            return PODS_PENDING
        later = later_than(pod.uid, planned)
        fit = await all_fit(self.view.basis_of(facts, moving).state, comers, self.view.turns(), later)
        return "" if fit else PODS_PENDING

    def would_admit_without(self, node: NodeName, pod: PodToSchedule, uids: Collection[str]) -> bool:
        """Whether the node would admit the pod if these pods of it were gone. Raises as `filter` does."""
        request = self._request(pod, quota=False)
        return not self._refusal_without(pod, request, node, {*uids, *self.view.holds(node).assumed})

    def _refusal_without(self, pod: PodToSchedule, request: Request, node: NodeName, uids: Collection[str]) -> str:
        """The code of a node's refusal of the pod if these pods were gone; empty where it would admit the pod then."""
        gone = frozenset((*uids, pod.uid))
        crowded = "" if self.planned(pod.uid) is not None else self._crowds(request, node, gone)
        return crowded or self._judge_without(request, node, gone)

    def _crowds(self, request: Request, node: NodeName, gone: frozenset[str]) -> str:
        """As `PlannedPods.refusal`, of a node that may not be offered."""
        view = self.view.nodes.get(node)
        return "" if view is None else self._planned.refusal(request, view, gone)

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As `Scheduling.bind`."""
        if self.binder is None:
            raise NoKubernetes
        await self.binder.bind(namespace, name, uid, node)

    def _note_asked(self, pod: PodToSchedule, request: Request, nodes: Sequence[NodeName]) -> None:
        """A single node may be that for which the pod is nominated: others may be for it, too."""
        if GANG in pod.request.annotations and len(nodes) > 1:
            key = key_of_gang(pod, request)
            known = self.view.nodes
            self._asked[key] = tuple(known[node].name for node in nodes if node in known)  # no copies of the names
            self._asked.move_to_end(key)
            if len(self._asked) > GANGS_KEPT:
                self._asked.popitem(last=False)

    def _request(self, pod: PodToSchedule, *, quota: bool = True) -> Request:
        """
        What the pod asks for, of a cluster of which all is known that was said up to now. Raises as `PodChecks` and, with
        `quota`, `Quotas` do.
        """
        finding = self._behind()
        if finding is not None:
            raise NotReadYet(finding)
        self.view.renew()
        self.checks.check_waiting(pod)
        if quota and self.quotas is not None:
            self.quotas.check_waiting(pod, without=self._leaving_for(pod))
        return self._decisions.request(pod)

    def _leaving_for(self, pod: PodToSchedule) -> Collection[str]:
        """UIDs of the pods that are being deleted on the node for which the pod is nominated."""
        return () if pod.nominated is None else self.view.terminating(pod.nominated)

    def _judge_without(self, request: Request, node: NodeName, uids: frozenset[str]) -> str:
        """The code of a node's refusal if these pods were gone; empty where it would admit the pod then."""
        view = self.view.nodes.get(node)
        if view is None or view.kind is None:
            return (self.view.foreign(node) or UNKNOWN_NODE) if view is None else view.refusal
        asked = request.of(view.kind, self.view)
        if asked.unlisted:
            return asked.unlisted
        facts = without_pods(self.view.facts(node), uids, self.view.holds(node).names_of(uids))
        return decided(self.view.basis_of(facts, uids).state, asked.demand)


def refused_before(request: Request, version: int, nodes: Sequence[NodeName]) -> RefusedByAll | None:
    """What was answered for this version of the cluster and the same nodes, in any order, if none of them was left."""
    known = request.refused_by_all
    if known is None or known.version != version or len(known.nodes) != len(nodes):
        return None
    return known if known.nodes == set(nodes) else None


def key_of_gang(pod: PodToSchedule, request: Request) -> object:
    """Equal for the pods of a gang that ask for the same and may go to the same nodes."""
    where = msgspec.json.encode(pod.constraints, order="deterministic")
    return pod.request.namespace, pod.request.annotations.get(GANG), request.key, where
