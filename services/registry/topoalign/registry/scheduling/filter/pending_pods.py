"""
Checks whether a pod would take resources that the planned pods of gangs need on its node, and whether it must wait.

A kubelet ignores reservations, so it can align another pod to NUMA nodes with resources reserved for planned pods:

    policy restricted; 3 GPUs are free on NUMA node 0 and 2 on node 1; pod b of a gang is planned on the 3 GPUs
    pod q requests 1 GPU: together with b it fits on node 1, but the kubelet aligns it to node 0

A pod that is admitted before the planned pods must leave enough for all of them. They are decided one after the other,
in the order of their reservations, which is the order of the plan. So the first planned pod always passes. Another
planned pod passes if it leaves enough for the others.

A single pending pod must also wait if the kubelet could refuse it after other pods end. Such a pod requests parts of
GPUs or co-allocated NICs, or has several containers, and one container can take what another needs. The filter passes
the node, because its kubelet would admit the pod now. But a node where a pod had to wait gets score 0 for that pod.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from topoalign.core.admission.free_amounts import Free, count_free
from topoalign.core.admission.realignment import PendingPod, fit_as_counted, left_elsewhere
from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.model.ids import NodeName, PodName
from topoalign.registry.scheduling.cluster_state.assumed_pods import Requested
from topoalign.registry.scheduling.cluster_state.view import ClusterView, NodeView
from topoalign.registry.scheduling.filter.admission_order import (
    Later,
    finds_co_allocated,
    fits_before_all,
    keeps_containers_together,
)
from topoalign.registry.scheduling.filter.decision_cache import KindNeed, PodClass
from topoalign.registry.scheduling.scheduling_api import PODS_PENDING, PodToSchedule
from topoalign.runtime.recent_dict import RecentDict

PODS_KEPT = 1_024
"""Maximum number of pods for which the nodes where they had to wait are kept."""


class WaitingPods:
    """Checks pods on nodes without other pending pods."""

    def __init__(self, view: ClusterView, request: Callable[[PodToSchedule], PodClass]) -> None:
        """`request`: returns the class of a pod."""
        self._view = view
        self._request = request
        self._waited = RecentDict[str, set[NodeName]](PODS_KEPT)
        """UID of a pod -> the nodes where it had to wait."""

    async def refusal(self, node: NodeName, pod: PodToSchedule) -> str:
        """`PODS_PENDING` if the kubelet could refuse the pod after others end; otherwise empty. Raises InvalidField."""
        view = self._view.nodes.get(node)
        if view is None or view.kind is None:
            return ""
        asked = self._request(pod).of(view.kind, self._view)
        if not asked.may_be_parted:
            return ""
        without = frozenset({pod.uid}) | self._view.pods_on(node).assumed
        state = self._view.basis_of(self._view.facts(node), without).state
        if (
            finds_gpus(state, asked.demand)
            and keeps_containers_together(state, asked.demand, asked.takes)
            and await finds_co_allocated(state, asked.demand, asked.takes, self._view.turns())
        ):
            return ""
        self._waited[pod.uid] = {*self.last_for(pod.uid), node}
        return PODS_PENDING

    def last_for(self, uid: str) -> Collection[NodeName]:
        """The nodes where the pod had to wait."""
        return self._waited.get(uid, ())


GANG_FIRST = "GangFirst"
"""Planned pods of a gang would no longer fit on the node."""


class Planned(NamedTuple):
    """A pod that is planned on a node."""

    uid: str
    gang: str
    pending_pod: PendingPod


class Crowd(NamedTuple):
    """The planned pods of a node, cached until the node changes."""

    version: int
    """The version of the node."""
    pods: Sequence[PendingPod]
    free: Free
    """The free amounts without the reservations of these pods."""


class PlannedPods:
    """Checks whether a pod leaves enough for the pods that are planned on its node."""

    def __init__(
        self,
        view: ClusterView,
        request: Callable[[PodToSchedule], PodClass],
        requested: Requested,
    ) -> None:
        """`request` returns a pod's class, `requested` a reserved pod's request; None: its resources count as held."""
        self._requested = requested
        self._view = view
        self._request = request
        self._crowds = WeakKeyDictionary[NodeView, Crowd]()

    def on(self, node: NodeView) -> list[Planned]:
        """The pods that are planned on a node, in the order of their reservations."""
        if node.kind is None:
            return []
        planned = []
        for place, each in enumerate(self._view.pods_on(node.name).planned):
            request = self._requested(each)
            if request is not None:
                pod_class = self._request(PodToSchedule(uid=each.pod_uid, request=request))
                need = pod_class.of(node.kind, self._view)
                planned.append(Planned(each.pod_uid, each.gang, pending_pod(f"planned {place}", pod_class, need)))
        return planned

    def refusal(self, request: PodClass, node: NodeView, gone: frozenset[str] = frozenset()) -> str:
        """`GANG_FIRST` if a pod leaves too little for planned pods; otherwise empty. `gone`: UIDs of pods to ignore."""
        if not self._view.pods_on(node.name).planned:  # true for most of thousands of nodes
            if self._crowds:
                self._crowds.pop(node, None)
            return ""
        if not gone and self._has_ample(request, node):
            return ""
        planned = [each for each in self.on(node) if each.uid not in gone]
        if not planned or node.kind is None:
            return ""
        state = self._view.basis_of(
            self._view.facts_without(node.name, gone), gone | {each.uid for each in planned}
        ).state
        new = pending_pod("new", request, request.of(node.kind, self._view))
        return "" if fits_before_all(state, new, later_than("", planned)) else GANG_FIRST

    def _has_ample(self, request: PodClass, node: NodeView) -> bool:
        """Whether amounts alone show that a pod leaves enough, whichever other pods end. True for most nodes."""
        if node.kind is None:
            return False
        crowd = self._crowds.get(node)
        if crowd is None or crowd.version != node.version:
            planned = self.on(node)
            facts = self._view.facts(node.name)
            uids = frozenset(each.uid for each in planned)
            pods = tuple(each.pending_pod for each in planned)
            free = count_free(self._view.basis_of(facts, uids).state, node.kind.rules)
            crowd = self._crowds[node] = Crowd(node.version, pods, free)
        asked = request.of(node.kind, self._view)
        new = PendingPod(request.key, asked.demand, True, asked.takes, asked.is_decided_by_amounts)
        return fit_as_counted(crowd.free, (new, *crowd.pods)) and next(left_elsewhere(new, crowd.free), None) is None


def pending_pod(name: str, request: PodClass, need: KindNeed, *, must_fit: bool = True) -> PendingPod:
    """A pending pod of this class with this need. `name` makes its pod name unique."""
    named = msgspec.structs.replace(request.pod, name=PodName(f"{request.pod.name} {name}"))
    demand = pod_demand(named, need.demand.rules)
    return PendingPod(request.key, demand, must_fit, need.takes, need.is_decided_by_amounts)


def later_than(uid: str, planned: list[Planned]) -> Later:
    """The planned pods for which a pod must leave enough."""
    uids = [each.uid for each in planned]
    # A planned pod must leave enough only for gangs planned before it. Otherwise two gangs could block each other.
    place = uids.index(uid) if uid in uids else len(planned)
    gang = planned[place].gang if uid in uids else ""
    others = [each.pending_pod for each in planned if each.uid != uid]
    return Later(others, [each.pending_pod for each in planned[:place] if not gang or each.gang != gang])
