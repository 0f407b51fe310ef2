"""
Keeps the data from the watches of the API server: the Nodes, the requests of pending pods, and the nodes of bound pods.

topoalign does not manage some nodes, such as those with NVIDIA's device plugin. The extender passes these nodes for
every pod, except pods of gangs, because a gang cannot be reserved as a whole there. A node without published facts is
unmanaged if its Node has the label `topoalign.io/managed: "false"`, or the setting `TOPOALIGN_UNKNOWN_NODES` makes all
such nodes unmanaged. A node with published facts is always managed, because its devices would otherwise be allocated
twice. If such a node has the label, a readiness note reports it. `topoalign forget` makes a former node unmanaged.
"""

from collections.abc import Callable

import anyio
import msgspec

from topoalign.core.demand.node_filters import is_node_eligible
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.ports import SeenNode, SeenPod
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, drop_irrelevant_metadata

MANAGED = "topoalign.io/managed"
"""Label of a Node. `false`: topoalign does not manage it."""


class ReportedNodes:
    """The Nodes that the API server reports."""

    def __init__(self, cluster: Cluster, *, pass_unknown: bool = False) -> None:
        """`cluster`: the nodes with published facts. `pass_unknown`: whether all nodes without facts are unmanaged."""
        self.uids: dict[NodeName, str] = {}
        """Name of a Node -> its UID."""
        self.listed = False
        """Whether the first list is complete."""
        self._nodes: dict[NodeName, SeenNode] = {}
        self._cluster = cluster
        self._pass_unknown = pass_unknown

    def see(self, node: SeenNode) -> NodeName | None:
        """Records a Node. Returns its name if its label `topoalign.io/managed` has changed."""
        before = self._is_labelled(node.name)
        self.uids[node.name] = node.uid
        self._nodes[node.name] = node
        return node.name if self._is_labelled(node.name) != before else None

    def lose(self, node: NodeName) -> None:
        """Removes a node that was deleted."""
        self.uids.pop(node, None)
        self._nodes.pop(node, None)

    def is_unmanaged(self, node: NodeName) -> bool:
        """Whether the node is a Kubernetes Node that topoalign does not manage."""
        if node not in self.uids or node in self._cluster:
            return False
        return self._pass_unknown or self._is_labelled(node)

    def passes(self, pod: PodToSchedule, node: NodeName) -> bool:
        """Whether the filter passes the node for the pod because topoalign does not manage it."""
        return self.is_unmanaged(node) and not pod.request.names_a_gang

    def finding(self) -> str | None:
        """Readiness note: the managed nodes with the label `topoalign.io/managed: "false"`; None: there are none."""
        nodes = sorted(node for node in self.uids if self._is_labelled(node) and node in self._cluster)
        if not nodes:
            return None
        remedy = "remove the label, or run `topoalign forget`"
        return f"topoalign manages nodes that are labelled {MANAGED}=false: {quoted(nodes)}; {remedy}"

    def _is_labelled(self, node: NodeName) -> bool:
        return node in self._nodes and self._nodes[node].labels.get(MANAGED) == "false"

    def allows(self, pod: PodToSchedule, node: NodeName) -> bool:
        """Whether Kubernetes has the Node, and the filters of Kubernetes accept it for the pod (`node_filters`)."""
        seen = self._nodes.get(node)
        return seen is not None and is_node_eligible(seen, pod.constraints)

    def has_gone(self, node: NodeName) -> bool:
        """Whether Kubernetes has no such Node. False before all Nodes are listed."""
        return self.listed and node not in self.uids


class ReportedPods:
    """The pods by UID. The watch lags, so there may be pods that it has not reported yet."""

    def __init__(self) -> None:
        self.waiting: dict[str, SeenPod] = {}
        """Pending pods that request devices, or exclusive CPUs or memory."""
        self.bound: dict[str, NodeName] = {}
        """UID of a bound pod that has neither ended nor been deleted -> its node."""
        self.listed = False
        """Whether the first list of pods is complete."""
        self._changed = anyio.Event()
        """Set when the next pod is reported. One event is enough, because only a few binds wait at a time."""

    def wait(self, pod: SeenPod) -> None:
        """Records a pod without a node."""
        self.waiting[pod.uid] = msgspec.structs.replace(pod, content=drop_irrelevant_metadata(pod.content))
        self._notify_reported()

    def bind(self, uid: str, node: NodeName) -> None:
        """Records a pod that is bound to a node."""
        self.waiting.pop(uid, None)
        self.bound[uid] = node
        self._notify_reported()

    def request_of(self, reserved: Reservation) -> PodRequest | None:
        """The request of a reserved pod; None: the watch has not reported it, or reports that it is bound."""
        waiting = self.waiting.get(reserved.pod_uid)
        asked = None if waiting is None else read_scheduled_pod(waiting)
        return None if asked is None else asked.request

    def has(self, uid: str) -> bool:
        """Whether the watch has reported the pod, and it has neither ended nor been deleted."""
        return uid in self.waiting or uid in self.bound

    def end(self, uid: str) -> NodeName | None:
        """Removes a pod that has ended or was deleted. Returns its node."""
        self.waiting.pop(uid, None)
        return self.bound.pop(uid, None)

    async def waiting_pod(self, namespace: str, name: str, uid: str, seconds: float) -> SeenPod | None:
        """The pod, if it is pending and not being deleted. Waits at most `seconds` until it is reported."""
        await self._until(lambda: self.has(uid), seconds)
        pod = self.waiting.get(uid)
        return pod if pod is not None and (pod.namespace, pod.name, pod.deleting) == (namespace, name, False) else None

    async def node_of(self, uid: str, seconds: float) -> NodeName | None:
        """The node of a pod. Waits at most `seconds` until it is reported; None: it was not reported."""
        await self._until(lambda: uid in self.bound, seconds)
        return self.bound.get(uid)

    def _notify_reported(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, is_shown: Callable[[], bool], seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not is_shown():
                await self._changed.wait()


def read_scheduled_pod(pod: SeenPod) -> PodToSchedule | None:
    """The pod, if it requests devices, or exclusive CPUs or memory; None for other pods and for an invalid pod."""
    try:
        asked = pod.to_schedule()
    except InvalidField:
        return None
    return asked if holds_something(asked.request) else None
