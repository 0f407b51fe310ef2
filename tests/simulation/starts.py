"""
How the containers of a pod with units of GPUs start: one after another, each once the plugin has let it (PreStartContainer).

As in kubelet v1.36.3: it calls the plugin for each resource of a container, in any order, each time that the container is
to start; where a call fails it tries again, with growing pauses, for as long as the pod is wanted; an init container has
ended before the next container starts. A kubelet that starts anew goes on where the former one was.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import anyio
from simulation.divisions import CORES, MEMORY
from simulation.pods import Container, Pod

from topoalign.core.model.errors import TopoalignError, Unavailable
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, ResourceName

if TYPE_CHECKING:
    from simulation.kubelet import Kubelet

AGAIN_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Before each further try; then the pod waits for the next kubelet."""
INIT_SECONDS = (0.0, 0.02, 3.0)
"""For so long an init container runs."""
IN_TURN = frozenset({CORES, MEMORY})
"""The resources whose plugin is called before a container starts."""


class Answer(NamedTuple):
    """What the plugin answered to Allocate: it is the container's as long as that lives."""

    name: AllocationID
    slots: Mapping[DeviceID, Amount]
    """How much it holds of a GPU by each slot, as far as that is recorded."""
    variables: Mapping[str, str]
    mounts: Mapping[str, str]
    """Path in the container -> path on the node."""


class Starts:
    """The pods of one node whose containers start in turn; outlives the kubelet, as the containers do."""

    def __init__(self, kubelet: "Kubelet") -> None:
        self._kubelet = kubelet
        self.at: dict[str, int] = {}
        """Pod -> which of its containers is to start, or runs as an init container."""

    def runs(self, uid: str, container: ContainerName) -> bool:
        """Whether a container of an admitted pod runs now; of an init container: it has not ended."""
        pod = self._kubelet.wanted[uid]
        place = next(place for place, each in enumerate(pod.containers) if each.name == container)
        return pod.containers[place].role != "init" or self.at.get(uid) == place

    async def start(self, pod: Pod) -> bool:
        """Starts what is not started yet. True once all runs."""
        kubelet = self._kubelet
        while (place := self.at.setdefault(pod.uid, 0)) < len(pod.containers):
            container = pod.containers[place]
            if not any(key[:2] == (pod.uid, container.name) for key in kubelet.used):
                if not await self._start(pod, container):
                    return False
                if container.role == "init":
                    await anyio.sleep(kubelet.chance.choice(INIT_SECONDS))
            if kubelet.wanted.get(pod.uid) is not pod:
                return False
            self.at[pod.uid] = place + 1
        del self.at[pod.uid]
        return True

    async def _start(self, pod: Pod, container: Container) -> bool:
        """One container. False: it does not start, or its pod has gone."""
        kubelet = self._kubelet
        for seconds in AGAIN_SECONDS:
            resources = [*container.limits]
            kubelet.chance.shuffle(resources)
            try:
                for resource in resources:
                    await self._call(pod, container, resource)
            except TopoalignError as error:
                kubelet.refusals.append(error)
                await anyio.sleep(seconds)
                continue
            if kubelet.wanted.get(pod.uid) is not pod:
                return False
            kubelet.begin(pod, container)
            return True
        return False

    async def _call(self, pod: Pod, container: Container, resource: ResourceName) -> None:
        """Raises what the plugin raises, and Unavailable where it is not there or the devices are not known."""
        kubelet = self._kubelet
        devices = kubelet.entries.get((pod.uid, container.name, resource))
        if devices is None:
            raise Unavailable(f"no {resource} of {container.name} in the cache of the kubelet", "delete the pod")
        if kubelet.plugin is None or resource not in kubelet.healthy:
            raise Unavailable(f"no endpoint of {resource}", "wait")
        if resource in IN_TURN:
            await kubelet.plugin.pre_start(resource, sorted(devices))
