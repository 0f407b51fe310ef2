"""
The kubelets of a simulated cluster: what they do with pods that are bound to their nodes, and what the API server shows.

A kubelet admits a pod some time after its Binding and sets its phase. When a pod is deleted, its containers take a while to
end; then the API server has the pod no longer. What is admitted, and when the node shows an end, the node decides.
"""

from collections.abc import Mapping
from random import Random
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec
from simulation.loop import SimulatedLoop

from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus
from topoalign.kubelet.files.manifest import PodManifest
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Object
from topoalign.tools.bench.schedule.node import Admitted, Bound

GRACE_SECONDS = (0.05, 1.5)
"""Between which two the containers of a deleted pod take to end."""


class KubeletNode(Protocol):
    """A node on which pods run."""

    async def admit(self, bus: Bus, bound: Bound) -> Admitted:
        """What its kubelet decides about a pod, some time after the Binding."""

    async def terminate(self, bus: Bus, uid: str) -> None:
        """The containers of a pod have ended: its kubelet has the devices free now, and the node's facts show it later."""


N = TypeVar("N", bound=KubeletNode)


class Kubelets(Generic[N]):
    """The kubelets of all nodes; `follow_pods` runs them."""

    def __init__(
        self, loop: SimulatedLoop, api: FakeCluster, bus: Bus, chance: Random, nodes: Mapping[NodeName, N]
    ) -> None:
        self.loop = loop
        self.api = api
        self.bus = bus
        self.chance = chance
        self.nodes = nodes
        self.refused: dict[str, str] = {}
        """Pod -> code with which its kubelet refused it."""
        self.bound_at: dict[str, float] = {}
        """Pod -> seconds of the loop at which it was bound."""
        self.gone_at: dict[str, float] = {}
        """Pod -> seconds of the loop at which the API server had it no longer, or as finished."""
        self.seconds: dict[str, float] = {}
        """Pod -> how long it runs; of others for ever."""

    def node_of(self, name: str) -> str | None:
        """Where a pod is bound."""
        node: str | None = self.api.pods.get(("default", name))["spec"].get("nodeName")
        return node

    def phase(self, name: str) -> str:
        """Of a pod; empty: it is gone."""
        try:
            return str(self.api.pods.get(("default", name))["status"]["phase"])
        except ApiError:
            return ""

    async def follow_pods(self, tasks: anyio.abc.TaskGroup) -> None:
        """Each kubelet starts what is bound to its node, and ends what is deleted."""
        pods = self.api.pods
        seen = pods.newest
        started: set[str] = set()
        ending: set[str] = set()
        while True:
            for change in pods.since(seen):
                seen, pod = change.version, change.object
                uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
                if not node or change.type == "DELETED":
                    continue
                is_deleted = bool(pod["metadata"].get("deletionTimestamp"))
                if uid not in started and pod["status"]["phase"] == "Pending" and not is_deleted:
                    started.add(uid)
                    self.bound_at.setdefault(pod["metadata"]["name"], self.loop.time())
                    tasks.start_soon(self._start, NodeName(node), pod)
                if is_deleted and uid not in ending:
                    ending.add(uid)
                    tasks.start_soon(self._delete, NodeName(node), pod)
            await pods.wait()

    async def _start(self, node: NodeName, pod: Object) -> None:
        metadata, name = pod["metadata"], pod["metadata"]["name"]
        bound = Bound(node, metadata["uid"], msgspec.convert(pod, PodManifest))
        admitted = await self.nodes[node].admit(self.bus, bound)
        key = (metadata["namespace"], name)
        if admitted.code:
            self.refused[name] = admitted.code
            self._set_status(key, phase="Failed", reason="UnexpectedAdmissionError")
            return
        self._set_status(key, phase="Running")
        if name in self.seconds:
            await anyio.sleep(self.seconds[name])
            await self._end(node, metadata["uid"], key, phase="Succeeded")

    async def _delete(self, node: NodeName, pod: Object) -> None:
        await anyio.sleep(self.chance.uniform(*GRACE_SECONDS))
        metadata = pod["metadata"]
        await self._end(node, metadata["uid"], (metadata["namespace"], metadata["name"]), phase="")

    async def _end(self, node: NodeName, uid: str, key: tuple[str, str], *, phase: str) -> None:
        """The containers have ended: the kubelet has their devices free, and the API server shows it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.nodes[node].terminate, self.bus, uid)
            await anyio.lowlevel.checkpoint()
            self.gone_at[key[1]] = self.loop.time()
            if phase:
                self._set_status(key, phase=phase)
            else:
                self.api.delete_pod(*key, grace=0)

    def _set_status(self, key: tuple[str, str], **status: str) -> None:
        try:
            self.api.set_status(*key, **status)
        except ApiError:  # it was deleted meanwhile
            return
