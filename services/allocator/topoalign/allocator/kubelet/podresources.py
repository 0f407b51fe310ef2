"""
Asks the kubelet who holds which devices.

Source: PodResources v1 of kubelet v1.36.3. It lists a container's devices one by one, each with its NUMA nodes, and knows
names but no UIDs.
"""

from pathlib import Path

from topoalign.allocator.kubelet import checkpoint, sockets
from topoalign.allocator.kubelet.api import v1
from topoalign.allocator.kubelet.client import ask
from topoalign.allocator.kubelet.desk import Holding, Listing
from topoalign.core.errors import StateFault
from topoalign.core.events import Owner
from topoalign.core.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.runtime.clock import SystemClock

LIST_SECONDS = 1.0


class PodResourcesClient:
    """The kubelet's PodResources socket, and its checkpoint beside it."""

    def __init__(self, socket: Path, checkpoint_dir: Path, clock: Clock | None = None) -> None:
        """`checkpoint_dir`: the device plugin directory, where the kubelet keeps `kubelet_internal_checkpoint`."""
        self._socket, self._checkpoint_dir = socket, checkpoint_dir
        self._clock = clock or SystemClock()

    async def listing(self) -> Listing:
        """Raises KubeletAway, after `LIST_SECONDS` at most."""
        kubelet = sockets.identity(self._socket)
        listed = await ask(
            self._socket, lambda channel: v1.PodResourcesListerStub(channel).list(LIST), self._clock, LIST_SECONDS
        )
        holdings = tuple(
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
        return Listing(
            kubelet=tuple(kubelet or ()),
            pods=len(listed.pod_resources),
            holdings=holdings,
            checkpoint=given_out(self._checkpoint_dir),
        )


LIST = v1.ListPodResourcesRequest()


def devices_by_resource(container: v1.ContainerResources) -> dict[ResourceName, frozenset[DeviceID]]:
    held: dict[ResourceName, frozenset[DeviceID]] = {}
    for part in container.devices:
        resource = ResourceName(part.resource_name)
        held[resource] = held.get(resource, frozenset()) | frozenset(map(DeviceID, part.device_ids))
    return held


def given_out(directory: Path) -> frozenset[tuple[ResourceName, DeviceID]] | None:
    """The devices that the kubelet's checkpoint knows; None where there is none, or none that can be trusted."""
    try:
        entries = checkpoint.decode((directory / checkpoint.NAME).read_bytes()).pod_device_entries
    except (OSError, StateFault):
        return None
    return frozenset(
        (ResourceName(entry.resource_name), DeviceID(device))
        for entry in entries or ()
        for devices in entry.device_ids.values()
        for device in devices
    )
