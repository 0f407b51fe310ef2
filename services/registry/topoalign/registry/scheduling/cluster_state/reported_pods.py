"""The pods as the API server's watch has shown them: what those that wait ask for, and where the others are bound."""

from collections.abc import Callable

import anyio
import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.scheduling_api import without_others


class ShownPods:
    """The pods by UID. What a watch shows was true a moment ago; a pod that it has not shown may exist."""

    def __init__(self) -> None:
        self.waiting: dict[str, SeenPod] = {}
        """Pods that are not bound, and will hold something of a node."""
        self.bound: dict[str, NodeName] = {}
        """The nodes of pods that are bound and neither ended nor gone."""
        self._changed = anyio.Event()
        """Set when the next pod is shown: only a few binds wait at a time."""

    def wait(self, pod: SeenPod) -> None:
        """The pod is shown without a node."""
        self.waiting[pod.uid] = msgspec.structs.replace(pod, content=without_others(pod.content))
        self._notify_shown()

    def bind(self, uid: str, node: NodeName) -> None:
        """The pod is shown on a node."""
        self.waiting.pop(uid, None)
        self.bound[uid] = node
        self._notify_shown()

    def has(self, uid: str) -> bool:
        """Whether the pod is shown, and has neither ended nor gone."""
        return uid in self.waiting or uid in self.bound

    def end(self, uid: str) -> NodeName | None:
        """The pod has ended, or is gone. Returns the node that it was bound to."""
        self.waiting.pop(uid, None)
        return self.bound.pop(uid, None)

    async def waiting_pod(self, namespace: str, name: str, uid: str, seconds: float) -> SeenPod | None:
        """
        The pod of this name with this UID, if it waits and is not on its way out. One that is not shown at all is waited for
        so long.
        """
        await self._until(lambda: self.has(uid), seconds)
        pod = self.waiting.get(uid)
        return pod if pod is not None and (pod.namespace, pod.name, pod.deleting) == (namespace, name, False) else None

    async def node_of(self, uid: str, seconds: float) -> NodeName | None:
        """The node of a pod. Waits for so long until it is shown; None: it was not."""
        await self._until(lambda: uid in self.bound, seconds)
        return self.bound.get(uid)

    def _notify_shown(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, is_shown: Callable[[], bool], seconds: float) -> None:
        """Until this is so, or for so long."""
        with anyio.move_on_after(seconds):
            while not is_shown():
                await self._changed.wait()
