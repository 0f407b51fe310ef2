"""
Pods that are planned to a node with their gangs, and whether they still fit there once another pod has come.

A kubelet knows no reservations when it aligns a pod. So what is reserved for pods that it has not received does not keep
another pod from NUMA nodes where they were to go:

    policy restricted, 3 GPUs are free on NUMA node 0 and 2 on node 1; b, of a gang, is planned to the 3
    q asks for 1 GPU: beside b it has room on node 1, and the kubelet aligns it to node 0

A pod that comes before those that are planned has to leave room for all of them, as they are decided one after the other in
the order of their reservations, from what the kubelet would have then. In this order a plan was made; so of the planned pods
themselves the first one is always let through, and whichever else leaves room for the others.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from topoalign.core.admission.free_amounts import Free, count_free
from topoalign.core.admission.realignment import PendingPodAmounts, fit_as_counted, left_elsewhere
from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.model.ids import NodeName, PodName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.state.terminated_pods import without_pods
from topoalign.registry.scheduling.cluster_state.assumed_pods import Requested, unknown_request
from topoalign.registry.scheduling.cluster_state.nodes import NodeView
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.admission_order import (
    Later,
    PendingPod,
    finds_co_allocated,
    in_amounts,
    keeps_containers_together,
    leaves_room,
)
from topoalign.registry.scheduling.filter.decision_cache import Request
from topoalign.registry.scheduling.model import PODS_PENDING, PodToSchedule

# Pods that no other pod waits beside: whether the end of others could lead a kubelet to refuse them. They ask for parts
# of GPUs, or for NICs beside them by annotations, or for several containers, of which one may take what another was to
# get.
#
# A node where such a pod has had to wait comes last for it: the filter passes the node, whose kubelet would admit the
# pod as it is, and others may be without that danger.


PODS_KEPT = 1_024
"""Of which it is kept where they had to wait."""


class WaitingPods:
    """Judges pods that wait alone on the nodes of a view."""

    def __init__(self, view: ClusterView, request: Callable[[PodToSchedule], Request]) -> None:
        """`request`: what a pod asks for."""
        self._view = view
        self._request = request
        self._waited = OrderedDict[str, set[NodeName]]()
        """By UID of the pod."""

    async def refusal(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        `PODS_PENDING`, where the end of others could lead the node's kubelet to refuse a pod that it would admit as it is;
        else empty. Raises InvalidField.
        """
        view = self._view.nodes.get(node)
        if view is None or view.kind is None:
            return ""
        asked = self._request(pod).of(view.kind, self._view)
        if not asked.may_be_parted:
            return ""
        without = frozenset({pod.uid}) | self._view.holds(node).assumed
        state = self._view.basis_of(self._view.facts(node), without).state
        demand = asked.demand
        takes = asked.takes
        if (
            finds_gpus(state, demand)
            and keeps_containers_together(state, demand, takes)
            and await finds_co_allocated(state, demand, takes, self._view.turns())
        ):
            return ""
        self._waited.setdefault(pod.uid, set()).add(node)
        if len(self._waited) > PODS_KEPT:
            self._waited.popitem(last=False)
        return PODS_PENDING

    def last_for(self, uid: str) -> Collection[NodeName]:
        """The nodes where the pod had to wait."""
        return self._waited.get(uid, ())


GANG_FIRST = "GangFirst"
"""Pods of a gang that are planned to the node would not fit there any more."""


class Planned(NamedTuple):
    """A pod that is planned to a node."""

    uid: str
    gang: str
    pending_pod: PendingPod


class Crowd(NamedTuple):
    """What is planned to a node, kept for all that is asked until the node changes."""

    version: int
    """Of the node."""
    pods: Sequence[PendingPodAmounts]
    free: Free
    """Without what is reserved for these pods."""


class PlannedPods:
    """What is planned to the nodes of a view."""

    def __init__(self, view: ClusterView, request: Callable[[PodToSchedule], Request]) -> None:
        """`request`: what a pod asks for."""
        self.requested: Requested = unknown_request
        """What the pod of a reservation asks for, where that is known. One of which it is not known counts as held."""
        self._view = view
        self._request = request
        self._crowds = WeakKeyDictionary[NodeView, Crowd]()

    def on(self, node: NodeView | None) -> list[Planned]:
        """The pods that are planned to a node, in the order of their reservations."""
        if node is None or node.kind is None:
            return []
        asked = [(each, self.requested(each)) for each in self._view.holds(node.name).planned]
        return [
            Planned(each.pod_uid, each.gang, self.pending_pod(f"planned {place}", pod, node, node.kind.rules))
            for place, (each, request) in enumerate(asked)
            if request is not None
            for pod in [self._request(PodToSchedule(uid=each.pod_uid, request=request))]
        ]

    def pending_pod(
        self, name: str, request: Request, node: NodeView | None, rules: AdmissionRules, *, must_fit: bool = True
    ) -> PendingPod:
        """A pod that comes to a node, under this name."""
        named = msgspec.structs.replace(request.pod, name=PodName(f"{request.pod.name} {name}"))
        asked = request.of(node.kind, self._view) if node is not None and node.kind is not None else None
        takes, decides = (
            (None, False) if asked is None else (asked.takes, asked.need is not None and asked.need.complete)
        )
        return PendingPod(request.key, pod_demand(named, rules), must_fit, takes, decides)

    def refusal(self, request: Request, node: NodeView, gone: frozenset[str] = frozenset()) -> str:
        """
        `GANG_FIRST`, where a pod that is planned nowhere leaves no room for what is planned to an offered node; else empty.
        `gone`: UIDs of pods that count as gone.
        """
        if not self._view.holds(node.name).planned:  # as most nodes, of which thousands are asked about
            if self._crowds:
                self._crowds.pop(node, None)
            return ""
        if not gone and self._has_ample(request, node):
            return ""
        planned = [each for each in self.on(node) if each.uid not in gone]
        if not planned or node.kind is None:
            return ""
        facts = without_pods(self._view.facts(node.name), gone, self._view.holds(node.name).names_of(gone))
        state = self._view.basis_of(facts, gone | {each.uid for each in planned}).state
        fits = leaves_room(state, self.pending_pod("new", request, node, node.kind.rules), later_than("", planned))
        return "" if fits else GANG_FIRST

    def _has_ample(self, request: Request, node: NodeView) -> bool:
        """Whether amounts tell that a pod leaves room, and is not led elsewhere by any end: so it is on most nodes."""
        if node.kind is None:
            return False
        crowd = self._crowds.get(node)
        if crowd is None or crowd.version != node.version:
            planned = self.on(node)
            facts = self._view.facts(node.name)
            uids = frozenset(each.uid for each in planned)
            pods = tuple(in_amounts(each.pending_pod) for each in planned)
            free = count_free(self._view.basis_of(facts, uids).state, node.kind.rules)
            crowd = self._crowds[node] = Crowd(node.version, pods, free)
        asked = request.of(node.kind, self._view)
        new = PendingPodAmounts(request.key, True, asked.takes, asked.need is not None and asked.need.complete)
        return fit_as_counted(crowd.free, (new, *crowd.pods)) and next(left_elsewhere(new, crowd.free), None) is None


def later_than(uid: str, planned: list[Planned]) -> Later:
    """
    What a pod leaves room for. One that is planned itself does whatever ends for those alone of other gangs that were
    planned before it: else two of them could wait for one another.
    """
    uids = [each.uid for each in planned]
    place = uids.index(uid) if uid in uids else len(planned)
    gang = planned[place].gang if uid in uids else ""
    others = [each.pending_pod for each in planned if each.uid != uid]
    return Later(others, [each.pending_pod for each in planned[:place] if not gang or each.gang != gang])
