"""Keeps what the API server's watch reports: its nodes, the requests of waiting pods, and the nodes of bound ones."""

from collections import OrderedDict
from collections.abc import Callable

import anyio
import msgspec

from topoalign.core.demand.node_filters import NodeTraits, is_node_eligible
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.registry.ports import SeenNode, SeenPod
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, without_others

REQUESTS_KEPT = 10_000
"""Reserved pods whose requests are kept: far more than are bound and not reported yet."""


class ReportedNodes:
    """The nodes of Kubernetes."""

    def __init__(self) -> None:
        self.uids: dict[NodeName, str] = {}
        """By name."""
        self.listed = False
        """Whether all of them were reported."""
        self._traits: dict[NodeName, NodeTraits] = {}

    def see(self, node: SeenNode) -> None:
        """Takes a node."""
        self.uids[node.name] = node.uid
        self._traits[node.name] = NodeTraits(
            name=node.name, labels=node.labels, taints=node.taints, unschedulable=node.unschedulable
        )

    def lose(self, node: NodeName) -> None:
        """Removes a node that was deleted."""
        self.uids.pop(node, None)
        self._traits.pop(node, None)

    def allows(self, pod: PodToSchedule, node: NodeName) -> bool:
        """Whether Kubernetes has the node, and its scheduler's filters allow it for the pod (`node_filters`)."""
        traits = self._traits.get(node)
        return traits is not None and is_node_eligible(traits, pod.constraints)

    def has_gone(self, node: NodeName) -> bool:
        """Whether Kubernetes has no such node; not before all of them are listed."""
        return self.listed and node not in self.uids


class ReportedPods:
    """The pods by UID. A watch is a moment late, so a pod that it has not reported may exist."""

    def __init__(self) -> None:
        self.waiting: dict[str, SeenPod] = {}
        """Pods that are not bound, and request devices, CPUs or memory exclusively."""
        self.bound: dict[str, NodeName] = {}
        """The nodes of pods that are bound and neither ended nor gone."""
        self.listed = False
        """Whether all pods were reported."""
        self._reserved: OrderedDict[str, PodRequest] = OrderedDict()
        """UID -> request, of the pods that this registry reserved last."""
        self._changed = anyio.Event()
        """Set when the next pod is reported: only a few binds wait at a time."""

    def wait(self, pod: SeenPod) -> None:
        """Takes a pod without a node."""
        self.waiting[pod.uid] = msgspec.structs.replace(pod, content=without_others(pod.content))
        self._notify_reported()

    def bind(self, uid: str, node: NodeName) -> None:
        """Takes a pod that is bound to a node."""
        self.waiting.pop(uid, None)
        self.bound[uid] = node
        self._notify_reported()

    def note_reserved(self, uid: str, request: PodRequest) -> None:
        """Keeps the request of a pod that this registry reserves for."""
        self._reserved[uid] = request
        while len(self._reserved) > REQUESTS_KEPT:
            self._reserved.popitem(last=False)

    def request_of(self, reserved: Reservation) -> PodRequest | None:
        """
        Returns the request of a reserved pod. If another registry binds it, or if it is planned with its gang, the request
        comes from the watch of Kubernetes.
        """
        own = self._reserved.get(reserved.pod_uid)
        waiting = self.waiting.get(reserved.pod_uid)
        if own is not None or waiting is None:
            return own
        asked = read_scheduled_pod(waiting)
        return asked.request if asked is not None else None

    def has(self, uid: str) -> bool:
        """Whether the pod is reported, and has neither ended nor been deleted."""
        return uid in self.waiting or uid in self.bound

    def end(self, uid: str) -> NodeName | None:
        """Removes a pod that has ended or was deleted. Returns its node."""
        self.waiting.pop(uid, None)
        return self.bound.pop(uid, None)

    async def waiting_pod(self, namespace: str, name: str, uid: str, seconds: float) -> SeenPod | None:
        """
        Returns the pod of this name and UID, if it has no node and is not being deleted. Waits at most `seconds` for a pod
        that is not reported yet.
        """
        await self._until(lambda: self.has(uid), seconds)
        pod = self.waiting.get(uid)
        return pod if pod is not None and (pod.namespace, pod.name, pod.deleting) == (namespace, name, False) else None

    async def node_of(self, uid: str, seconds: float) -> NodeName | None:
        """Returns the node of a pod. Waits at most `seconds` until it is reported; None: it was not."""
        await self._until(lambda: uid in self.bound, seconds)
        return self.bound.get(uid)

    def _notify_reported(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, is_shown: Callable[[], bool], seconds: float) -> None:
        """Waits until the condition holds, at most `seconds`."""
        with anyio.move_on_after(seconds):
            while not is_shown():
                await self._changed.wait()


def read_scheduled_pod(pod: SeenPod) -> PodToSchedule | None:
    """Returns the pod if it will hold exclusive resources of a node; None also for a pod that cannot be read."""
    try:
        asked = pod.to_schedule()
    except InvalidField:
        return None
    return asked if holds_something(asked.request) else None
