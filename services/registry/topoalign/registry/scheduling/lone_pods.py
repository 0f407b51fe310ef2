"""
Pods that no other pod waits beside: whether the end of others could lead a kubelet to refuse them. They ask for parts of
GPUs, or for NICs beside them by annotations, or for several containers, of which one may take what another was to get.

A node where such a pod has had to wait comes last for it: the filter passes the node, whose kubelet would admit the pod as
it is, and others may be without that danger.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.binding.binding import PODS_PENDING
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.admission_order import finds_companions, keeps_containers_together
from topoalign.registry.scheduling.filter.decision_cache import Request
from topoalign.registry.scheduling.model import PodToSchedule

PODS_KEPT = 1_024
"""Of which it is kept where they had to wait."""


class LonePods:
    """Judges pods that wait alone on the nodes of a view."""

    def __init__(self, view: ClusterView, request: Callable[[PodToSchedule], Request]) -> None:
        """`request`: what a pod asks for."""
        self._view, self._request = view, request
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
        demand, takes = asked.demand, asked.takes
        if (
            finds_gpus(state, demand)
            and keeps_containers_together(state, demand, takes)
            and await finds_companions(state, demand, takes, self._view.turns())
        ):
            return ""
        self._waited.setdefault(pod.uid, set()).add(node)
        if len(self._waited) > PODS_KEPT:
            self._waited.popitem(last=False)
        return PODS_PENDING

    def last_for(self, uid: str) -> Collection[NodeName]:
        """The nodes where the pod had to wait."""
        return self._waited.get(uid, ())
