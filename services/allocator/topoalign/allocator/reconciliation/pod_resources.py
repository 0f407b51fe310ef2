"""
Reads from the kubelet which devices each container has.

The source is PodResources v1 of kubelet v1.36.3. For each container, it lists the devices with their NUMA nodes, the
exclusive CPUs, and the memory if the memory manager's Static policy allocated it. PodResources has pod names but no
UIDs. The checkpoint has UIDs but no names. A checkpoint entry belongs to the container with the same name and devices.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import structlog

from topoalign.allocator.ports import KubeletListing, Place, ReportedDevices, ResourceEntry
from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.events import ContainerUsage, MemoryBlock, Owner
from topoalign.core.model.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import ListedDevices
from topoalign.core.model.topology.cpuset import LARGEST_ID, format_cpuset, parse_cpuset
from topoalign.core.model.topology.topology_checks import MOST_OTHERS
from topoalign.core.ports import Clock
from topoalign.kubelet.files import checkpoint, device_checkpoint, pod_directories
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.kubelet.files.reading import file_version
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.decoding import field
from topoalign.kubelet.grpc.kubelet_client import KeptChannel, KubeletAway
from topoalign.kubelet.grpc.pod_resources_codec import Devices, Fields, read_changed_devices, read_listed_pods
from topoalign.kubelet.grpc.transport import Complaints
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.thread_reader import ThreadReader

LIST_SECONDS = 1.0
READ_SECONDS = 1.0

Listed = dict[ResourceName, tuple[ListedDevices, ...]]
"""Resource -> the devices of its device plugin."""

log = structlog.get_logger("topoalign.allocator.podresources")


class CheckpointDevices(NamedTuple):
    """The entries of a device checkpoint."""

    parts: tuple[ResourceEntry, ...] = ()
    places: frozenset[Place] | None = None
    """The devices in the entries. None if there is no checkpoint or it cannot be read."""


UNREAD = CheckpointDevices()


class PodResourcesClient:
    """Polls the kubelet's PodResources socket and reads the checkpoint and the pod directories."""

    def __init__(self, socket: Path, checkpoint_dir: Path, clock: Clock | None = None) -> None:
        """`checkpoint_dir`: the device plugin directory in the kubelet's root directory."""
        self._socket = socket
        self._checkpoint_dir = checkpoint_dir
        self._clock = clock or SystemClock()
        self.channel = KeptChannel(socket, self._clock)
        """The connection to the kubelet, shared with its other callers."""
        self._checkpoint: tuple[tuple[int, ...], CheckpointDevices] = ((), UNREAD)
        """Cache: version of the file (inode, time of change, size) and its entries."""
        self._checkpoints: ThreadReader[CheckpointDevices] = ThreadReader()
        self._directories: ThreadReader[PodDirectories | None] = ThreadReader()
        self._listed: tuple[Fields | None, Listed] = (None, {})
        """Cache: the encoded fields of the last GetAllocatableResources response, and its devices."""
        self._unknown: str | None = None
        """The reason if the pod directories cannot be read."""
        self._complaints = Complaints(socket.name)
        self._is_logged = False
        """Whether `_unknown` was logged."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.channel.close()

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        """
        Polls all containers' devices and reads the kubelet's files. A file counts as unreadable after `READ_SECONDS`.
        Raises KubeletAway if PodResources gives no valid answer within `seconds` (None: `LIST_SECONDS`).
        """
        kubelet = unix_sockets.identity(self._socket)
        within = LIST_SECONDS if seconds is None else seconds
        listed, devices_of = await self.channel.ask(
            lambda channel: v1.PodResourcesListerStub(channel).list(LIST), within, read_listed_pods
        )
        shown = ((pod, container) for pod in listed.pod_resources for container in pod.containers)
        try:
            usage = tuple(read_container_usage(*each, devices) for each, devices in zip(shown, devices_of, strict=True))
        except ValueError as error:
            raise KubeletAway(f"PodResources reports invalid values: {clean(str(error), 200)}") from error
        holdings = tuple(
            ReportedDevices(owner=used.owner, resource=resource, devices=frozenset(devices))
            for used in usage
            for resource, devices in used.devices.items()
        )
        written, given = await self._read_checkpoint()
        directories = await self._pod_directories(bool(listed.pod_resources))
        return KubeletListing(
            kubelet=tuple(kubelet or ()),
            since=kubelet[-1] / 1e9 if kubelet else self._clock.wall(),
            pods=len(listed.pod_resources),
            holdings=add_pod_uids(holdings, given.parts, directories),
            checkpoint=given.places,
            parts=given.parts,
            written=written,
            is_own=kubelet is not None and written[1:2] > kubelet[-1:],
            directories=directories,
            usage=usage,
        )

    async def devices(self, ours: Collection[ResourceName] = ()) -> Listed:
        """
        Reads the healthy devices of other plugins; `ours`: resources to omit. Raises KubeletAway within `LIST_SECONDS`.
        """
        known, listed = self._listed
        left_out = tuple(field(1, resource.encode()) for resource in ours)
        fields, response = await self.channel.ask(
            lambda channel: v1.PodResourcesListerStub(channel).get_allocatable_resources(ALLOCATABLE),
            LIST_SECONDS,
            lambda answer: read_changed_devices(answer, known, left_out),
        )
        if response is None:
            return listed
        try:
            listed = listed_devices(response)
        except ValueError as error:
            raise KubeletAway(f"PodResources reports invalid values: {clean(str(error), 200)}") from error
        self._listed = fields, listed
        return listed

    def written(self) -> tuple[int, ...]:
        """Returns the current version of the checkpoint file, as `file_version`."""
        return file_version(self._checkpoint_dir / device_checkpoint.NAME)

    async def _read_checkpoint(self) -> tuple[tuple[int, ...], CheckpointDevices]:
        file = self._checkpoint_dir / device_checkpoint.NAME
        version = self.written()
        if not version:
            return (), UNREAD
        if version != self._checkpoint[0]:
            try:
                read = await self._checkpoints.read(lambda: read_checkpoint_devices(file), READ_SECONDS)
            except TimeoutError:
                return version, UNREAD
            self._checkpoint = version, read
        return self._checkpoint

    async def _pod_directories(self, any_listed: bool) -> PodDirectories | None:
        found = None
        root = self._checkpoint_dir.parent
        unknown = f"there is no directory {root / pod_directories.NAME}"
        try:
            found = await self._directories.read(lambda: pod_directories.read_pod_directories(root), READ_SECONDS)
        except TimeoutError:
            unknown = "they could not be read in time"
        except StateFault as fault:
            unknown = str(fault)
        # If the directory is empty although pods run, `pods/` is a separate file system that is not mounted here.
        if found is not None and any_listed and not found.torn_down:
            found = None
            unknown = f"{root / pod_directories.NAME} is empty although pods run"
        if found is not None and self._unknown is not None and self._is_logged:
            log.info("the directories of pods can be read again")
        if found is None and self._unknown != unknown:
            self._is_logged = self._complaints.report("deleted pods cannot be recognized by their directories", unknown)
        self._unknown = None if found is not None else unknown
        return found


LIST = v1.ListPodResourcesRequest()
ALLOCATABLE = v1.AllocatableResourcesRequest()


def listed_devices(response: v1.AllocatableResourcesResponse) -> Listed:
    """Returns resource -> the healthy devices of its device plugin, grouped by NUMA nodes. Raises ValueError."""
    found: dict[ResourceName, dict[DeviceID, set[int]]] = {}
    for part in response.devices:
        nodes = [node.id for node in part.topology.nodes] if part.topology is not None else []
        if not all(-1 <= node <= LARGEST_ID for node in nodes):
            raise ValueError(f"NUMA nodes {nodes} of {part.resource_name} are out of range")
        for device in part.device_ids:
            found.setdefault(ResourceName(part.resource_name), {}).setdefault(DeviceID(device), set()).update(nodes)
    if (count := sum(map(len, found.values()))) > MOST_OTHERS:
        raise ValueError(f"{count} devices are more than {MOST_OTHERS}")
    listed: Listed = {}
    for resource, devices in sorted(found.items()):
        ids: dict[tuple[int, ...], list[DeviceID]] = {}
        for device in sorted(devices):
            ids.setdefault(tuple(sorted(devices[device])), []).append(device)
        listed[resource] = tuple(ListedDevices(nodes=nodes or None, ids=tuple(ids[nodes])) for nodes in sorted(ids))
    return listed


def read_container_usage(pod: v1.PodResources, container: v1.ContainerResources, devices: Devices) -> ContainerUsage:
    """Returns the CPUs, memory and `devices` that PodResources reports for a container. Raises ValueError."""
    memory: list[MemoryBlock] = []
    for block in container.memory:
        listed = block.topology.nodes if block.topology is not None else []
        nodes = tuple(sorted(parse_cpuset(format_cpuset(node.id for node in listed))))
        # The distribution over the NUMA nodes is not reported, so all memory is assigned to the first node.
        taken = (block.size, *(0 for _ in nodes[1:])) if nodes else ()
        memory.append(MemoryBlock(resource=ResourceName(block.memory_type), nodes=nodes, size=block.size, taken=taken))
    return ContainerUsage(
        owner=Owner(namespace=Namespace(pod.namespace), pod=PodName(pod.name), container=ContainerName(container.name)),
        cpus=format_cpuset(container.cpu_ids),
        memory=tuple(memory),
        devices={resource: tuple(sorted(ids)) for resource, ids in devices.items()},
    )


def read_checkpoint_devices(file: Path) -> CheckpointDevices:
    """Reads the kubelet's device checkpoint. Returns UNREAD if there is none or it is damaged."""
    try:
        content = checkpoint.read_checkpoint_file(file)
        entries = device_checkpoint.decode_device_checkpoint(content or b"").pod_device_entries
    except StateFault:
        return UNREAD
    parts = tuple(
        ResourceEntry(
            ResourceName(entry.resource_name),
            frozenset(DeviceID(d) for ids in entry.device_ids.values() for d in ids),
            entry.pod_uid,
            entry.container_name,
        )
        for entry in entries or ()
    )
    return CheckpointDevices(parts, frozenset((part.resource, device) for part in parts for device in part.devices))


def add_pod_uids(
    holdings: Sequence[ReportedDevices], given: Iterable[ResourceEntry], directories: PodDirectories | None
) -> tuple[ReportedDevices, ...]:
    """Adds the pod UID to a holding if only one existing pod has a checkpoint entry for its container and devices."""
    uids: dict[tuple[str, ResourceName, frozenset[DeviceID]], set[str]] = {}
    for part in given:
        uids.setdefault((part.container, part.resource, part.devices), set()).add(part.pod_uid)

    def uid_of(holding: ReportedDevices) -> str:
        found = uids.get((holding.owner.container, holding.resource, holding.devices), set())
        if len(found) > 1 and directories is not None:
            found = {uid for uid in found if not directories.is_gone(uid)}
        return next(iter(found)) if len(found) == 1 else ""

    return tuple(msgspec.structs.replace(holding, pod_uid=uid_of(holding)) for holding in holdings)
