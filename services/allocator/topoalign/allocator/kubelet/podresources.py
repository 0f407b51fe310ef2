"""
Asks the kubelet who holds which devices.

Source: PodResources v1 of kubelet v1.36.3. It lists a container's devices one by one, each with its NUMA nodes, its
exclusive CPUs, and its memory where the Static memory manager gave it; it knows names but no UIDs.
"""

from pathlib import Path

import anyio

from topoalign.allocator.kubelet import sockets
from topoalign.allocator.kubelet.api import v1
from topoalign.allocator.kubelet.client import KubeletAway, ask
from topoalign.allocator.kubelet.desk import Holding, Listing
from topoalign.core.errors import StateFault, clean
from topoalign.core.events import ContainerUsage, MemoryBlock, Owner
from topoalign.core.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.kubelet import checkpoint, device_checkpoint
from topoalign.runtime.clock import SystemClock

LIST_SECONDS = 1.0
READ_SECONDS = 1.0

Given = tuple[tuple[ResourceName, frozenset[DeviceID]], ...]
"""What a checkpoint has given away: the devices of one resource of one container each."""


class PodResourcesClient:
    """The kubelet's PodResources socket, and its checkpoint beside it."""

    def __init__(self, socket: Path, checkpoint_dir: Path, clock: Clock | None = None) -> None:
        """`checkpoint_dir`: the device plugin directory, where the kubelet keeps `kubelet_internal_checkpoint`."""
        self._socket, self._checkpoint_dir = socket, checkpoint_dir
        self._clock = clock or SystemClock()
        self._checkpoint: tuple[tuple[int, ...], Given | None] = ((), None)
        """Of which file (inode, time of change, size), and what it says: it is read, and its checksum made, once."""
        self._turn = anyio.Lock()
        self._reading = False

    async def listing(self) -> Listing:
        """
        Raises KubeletAway, after `LIST_SECONDS` at most. A checkpoint that takes longer than `READ_SECONDS` counts as one
        that cannot be read.
        """
        kubelet = sockets.identity(self._socket)
        listed = await ask(
            self._socket, lambda channel: v1.PodResourcesListerStub(channel).list(LIST), self._clock, LIST_SECONDS
        )
        try:
            usage = tuple(usage_of(pod, container) for pod in listed.pod_resources for container in pod.containers)
        except ValueError as error:
            raise KubeletAway(f"PodResources says what cannot be: {clean(str(error), 200)}") from error
        holdings = tuple(
            Holding(owner=used.owner, resource=resource, devices=frozenset(devices))
            for used in usage
            for resource, devices in used.devices.items()
        )
        given = await self._given_out()
        return Listing(
            kubelet=tuple(kubelet or ()),
            since=kubelet[-1] / 1e9 if kubelet else self._clock.wall(),
            pods=len(listed.pod_resources),
            holdings=holdings,
            checkpoint=None if given is None else frozenset((name, device) for name, ids in given for device in ids),
            parts=given or (),
            usage=usage,
        )

    async def _given_out(self) -> Given | None:
        file = self._checkpoint_dir / device_checkpoint.NAME
        try:
            status = file.stat()
        except OSError:
            return None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        with anyio.move_on_after(READ_SECONDS):
            async with self._turn:
                if version != self._checkpoint[0] and not self._reading:  # a thread that hangs in there is enough
                    self._checkpoint = (
                        version,
                        await anyio.to_thread.run_sync(self._read, file, abandon_on_cancel=True),
                    )
        return self._checkpoint[1] if version == self._checkpoint[0] else None

    def _read(self, file: Path) -> Given | None:
        self._reading = True
        try:
            return given_out(file)
        finally:
            self._reading = False


LIST = v1.ListPodResourcesRequest()


def usage_of(pod: v1.PodResources, container: v1.ContainerResources) -> ContainerUsage:
    """All that is shown of a container. Raises ValueError."""
    return ContainerUsage(
        owner=Owner(namespace=Namespace(pod.namespace), pod=PodName(pod.name), container=ContainerName(container.name)),
        cpus=format_cpuset(container.cpu_ids),
        memory=tuple(map(block, container.memory)),
        devices=devices_by_resource(container),
    )


def block(memory: v1.ContainerMemory) -> MemoryBlock:
    """How it is spread over its NUMA nodes is not shown; here all of it stands on the first. Raises ValueError."""
    listed = memory.topology.nodes if memory.topology is not None else []
    nodes = tuple(sorted(parse_cpuset(format_cpuset(node.id for node in listed))))
    taken = (memory.size, *(0 for _ in nodes[1:])) if nodes else ()
    return MemoryBlock(resource=ResourceName(memory.memory_type), nodes=nodes, size=memory.size, taken=taken)


def devices_by_resource(container: v1.ContainerResources) -> dict[ResourceName, tuple[DeviceID, ...]]:
    """Each resource's devices, sorted; one that is listed under several NUMA nodes is one."""
    held: dict[ResourceName, set[DeviceID]] = {}
    for part in container.devices:
        held.setdefault(ResourceName(part.resource_name), set()).update(map(DeviceID, part.device_ids))
    return {resource: tuple(sorted(devices)) for resource, devices in held.items()}


def given_out(file: Path) -> Given | None:
    """What the kubelet's checkpoint has given away; None where there is none, or none that can be trusted."""
    try:
        content = checkpoint.read(file)
        entries = device_checkpoint.decode(content or b"").pod_device_entries
    except StateFault:
        return None
    return tuple(
        (ResourceName(entry.resource_name), frozenset(DeviceID(d) for ids in entry.device_ids.values() for d in ids))
        for entry in entries or ()
    )
