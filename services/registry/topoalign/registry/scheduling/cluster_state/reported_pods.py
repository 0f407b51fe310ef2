"""Keeps the pods of the API server's watch: the requests of waiting pods, and the nodes of bound ones."""

from collections.abc import Callable

import anyio
import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.scheduling_api import without_others


class ReportedPods:
    """The pods by UID. A watch is a moment late, so a pod that it has not reported may exist."""

    def __init__(self) -> None:
        self.waiting: dict[str, SeenPod] = {}
        """Pods that are not bound, and request devices, CPUs or memory exclusively."""
        self.bound: dict[str, NodeName] = {}
        """The nodes of pods that are bound and neither ended nor gone."""
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
