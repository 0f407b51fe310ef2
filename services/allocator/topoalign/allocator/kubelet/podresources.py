"""
Asks the kubelet who holds which devices.

Source: PodResources v1 of kubelet v1.36.3. It lists a container's devices one by one, each with its NUMA nodes, and knows
names but no UIDs.
"""

from pathlib import Path

import anyio

from topoalign.allocator.kubelet import sockets
from topoalign.allocator.kubelet.api import v1
from topoalign.allocator.kubelet.client import ask
from topoalign.allocator.kubelet.desk import Holding, Listing
from topoalign.core.errors import StateFault
from topoalign.core.events import Owner
from topoalign.core.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.kubelet import device_checkpoint
from topoalign.runtime.clock import SystemClock

LIST_SECONDS = 1.0

Given = frozenset[tuple[ResourceName, DeviceID]]


class PodResourcesClient:
    """The kubelet's PodResources socket, and its checkpoint beside it."""

    def __init__(self, socket: Path, checkpoint_dir: Path, clock: Clock | None = None) -> None:
        """`checkpoint_dir`: the device plugin directory, where the kubelet keeps `kubelet_internal_checkpoint`."""
        self._socket, self._checkpoint_dir = socket, checkpoint_dir
        self._clock = clock or SystemClock()
        self._checkpoint: tuple[tuple[int, ...], Given | None] = ((), None)
        """Of which file (inode, time of change, size), and what it says: it is read, and its checksum made, once."""

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
            since=kubelet[-1] / 1e9 if kubelet else self._clock.wall(),
            pods=len(listed.pod_resources),
            holdings=holdings,
            checkpoint=await self._given_out(),
        )

    async def _given_out(self) -> Given | None:
        file = self._checkpoint_dir / device_checkpoint.NAME
        try:
            status = file.stat()
        except OSError:
            return None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._checkpoint[0]:
            self._checkpoint = (version, await anyio.to_thread.run_sync(given_out, file))
        return self._checkpoint[1]


LIST = v1.ListPodResourcesRequest()


def devices_by_resource(container: v1.ContainerResources) -> dict[ResourceName, frozenset[DeviceID]]:
    held: dict[ResourceName, frozenset[DeviceID]] = {}
    for part in container.devices:
        resource = ResourceName(part.resource_name)
        held[resource] = held.get(resource, frozenset()) | frozenset(map(DeviceID, part.device_ids))
    return held


def given_out(file: Path) -> Given | None:
    """The devices that the kubelet's checkpoint knows; None where there is none, or none that can be trusted."""
    try:
        entries = device_checkpoint.decode(file.read_bytes()).pod_device_entries
    except (OSError, StateFault):
        return None
    return frozenset(
        (ResourceName(entry.resource_name), DeviceID(device))
        for entry in entries or ()
        for devices in entry.device_ids.values()
        for device in devices
    )
