"""
Asks the kubelet who holds which devices.

Source: PodResources v1 of kubelet v1.36.3. It lists a container's devices one by one, each with its NUMA nodes, and knows
names but no UIDs.
"""

from pathlib import Path

from topoalign.allocator.kubelet.api import v1
from topoalign.allocator.kubelet.client import ask
from topoalign.allocator.kubelet.desk import Holding
from topoalign.core.events import Owner
from topoalign.core.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.runtime.clock import SystemClock

LIST_SECONDS = 1.0


class PodResourcesClient:
    """The kubelet's PodResources socket."""

    def __init__(self, socket: Path, clock: Clock | None = None) -> None:
        self._socket = socket
        self._clock = clock or SystemClock()

    async def holdings(self) -> tuple[Holding, ...]:
        """All devices of all containers that the kubelet knows. Raises KubeletAway, after `LIST_SECONDS` at most."""
        listed = await ask(
            self._socket, lambda channel: v1.PodResourcesListerStub(channel).list(LIST), self._clock, LIST_SECONDS
        )
        return tuple(
            Holding(
                owner=Owner(
                    namespace=Namespace(pod.namespace), pod=PodName(pod.name), container=ContainerName(container.name)
                ),
                resource=resource,
                devices=devices,
            )
            for pod in listed.pod_resources
            for container in pod.containers
            for resource, devices in devices_by_resource(container).items()
        )


LIST = v1.ListPodResourcesRequest()


def devices_by_resource(container: v1.ContainerResources) -> dict[ResourceName, frozenset[DeviceID]]:
    held: dict[ResourceName, frozenset[DeviceID]] = {}
    for part in container.devices:
        resource = ResourceName(part.resource_name)
        held[resource] = held.get(resource, frozenset()) | frozenset(map(DeviceID, part.device_ids))
    return held
