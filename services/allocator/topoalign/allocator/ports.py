"""The protocols between the device plugins (`KubeletFront`), the allocator and the kubelet's record, with defaults."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from topoalign.core.model.events import Allocation, ContainerUsage, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.files.pod_directories import PodDirectories

AskedDevices = Sequence[Collection[DeviceID]]
"""The devices of one Allocate call, by container: lists, or sets after the check that the hardware lists them."""


class AllocatorPort(Protocol):
    """The allocator as `KubeletFront` calls it. Implemented by `allocator.allocate.service.DeviceAllocations`."""

    @property
    def state(self) -> NodeState:
        """The current state of the node: hardware, health and allocations."""

    @property
    def version(self) -> int:
        """Increases with every change of `state`."""

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """GPU -> why no part of it can be allocated now, even if it is healthy: MIG instances cannot be created."""

    async def wait_past(self, version: int) -> None:
        """Waits until `version` is greater than this one. Any number of callers may wait."""

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """
        Returns the best connected set of `size` devices that includes `must_include`, by the node's device policy; () for an
        invalid request. Devices with a live allocation are chosen only if there are not enough others.
        """

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        """
        Records that the kubelet allocated these devices, one set per container, with the co-allocated devices that are
        reserved with them. When this returns, the record is on disk.

        Raises UnknownDevice, InvalidField (empty or repeated ids), DeviceInUse, CoAllocatedLacking, NotVisible,
        StateFault. Allocates all sets or none.
        """

    def named(self, resource: ResourceName, allocation: Allocation) -> Mapping[ResourceName, tuple[DeviceID, ...]]:
        """
        Returns resource -> all devices that the container of an allocation of this resource has or will have. Empty if
        the container has neither co-allocated devices nor GPUs or NICs of several resources. Every answer for the
        container lists all of these devices.
        """

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        """
        Polls PodResources, and checks a container with these devices that is about to start. Raises Unavailable. Raises
        ShareSplit and InvalidShare if the devices are vcuda units that are not the share of one container. Raises
        NotAsReserved if they are vGPU slots with other amounts than those reserved for the container.
        """


Place = tuple[ResourceName, DeviceID]
"""A device, and the resource as which the kubelet allocates it."""


class ReportedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that a container holds, as PodResources lists them."""

    owner: Owner
    resource: ResourceName
    devices: frozenset[DeviceID]
    pod_uid: str = ""
    """UID of its pod, from the checkpoint; empty: unknown. PodResources does not report UIDs."""


class ResourceEntry(NamedTuple):
    """One entry of the checkpoint: the devices of one resource that one container has."""

    resource: ResourceName
    devices: frozenset[DeviceID]
    pod_uid: str = ""
    """Empty: unknown."""
    container: str = ""


class KubeletListing(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The kubelet's data at one moment: the answer of PodResources, and its checkpoint and pod directories."""

    kubelet: tuple[int, ...]
    """Identifies the kubelet process that answered: differs after a restart of the kubelet."""
    since: float
    """Unix time in seconds at which this kubelet began to listen."""
    pods: int
    """Number of pods that it listed, with or without devices."""
    holdings: tuple[ReportedDevices, ...]
    """Devices of app containers and sidecars. PodResources does not list other init containers."""
    checkpoint: frozenset[Place] | None
    """Devices that the checkpoint lists for any container, including init containers. None: it cannot be read."""
    parts: tuple[ResourceEntry, ...] = ()
    """The entries of the checkpoint, by container and resource. Entries of deleted pods stay until the next write."""
    written: tuple[int, ...] = ()
    """Identifies the version of the checkpoint: differs after every write."""
    is_own: bool = False
    """Whether the kubelet process that answered wrote this version, so that its memory contains all of it."""
    directories: PodDirectories | None = None
    """Which pods are deleted. None: unknown, because their directories cannot be read."""
    usage: tuple[ContainerUsage, ...] = ()
    """What PodResources reports of each container: CPUs, memory and the devices of every plugin, by owner."""

    @cached_property
    def shown(self) -> Mapping[Place, ReportedDevices]:
        """Device -> the container with which PodResources reports it."""
        return {(holding.resource, device): holding for holding in self.holdings for device in holding.devices}

    def is_gone(self, pod_uid: str) -> bool:
        """Whether a pod is deleted, judged by its directory; False if the directories cannot be read."""
        return self.directories is not None and self.directories.is_gone(pod_uid)

    def shows(self, allocation: Allocation) -> bool:
        """Whether PodResources reports any device of an allocation with a container."""
        given = allocation.from_kubelet.items()
        return any((resource, device) in self.shown for resource, ids in given for device in ids)

    @cached_property
    def parts_by_place(self) -> Mapping[Place, Sequence[ResourceEntry]]:
        """Device -> the checkpoint's entries with it. There are two if one of them is of a deleted pod."""
        found: dict[Place, list[ResourceEntry]] = {}
        for part in self.parts:
            for device in part.devices:
                found.setdefault((part.resource, device), []).append(part)
        return found


class Poll(NamedTuple):
    """The kubelet's answer to a poll, and the allocations that it covers."""

    listing: KubeletListing
    live: frozenset[AllocationID]
    """The allocations that were live at the poll. The answer does not cover later ones."""
    at: float
    """Monotonic seconds of the poll."""


class PodResources(Protocol):
    """The kubelet's own record of which container has which devices."""

    def written(self) -> tuple[int, ...]:
        """The version of the checkpoint file that is on disk now, as `KubeletListing.written`; () if there is none."""

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        """Polls the devices of all containers. `seconds`: time limit; None: the default. Raises Unavailable."""


class Reservations(Protocol):
    """What the registries have reserved on this node."""

    def current(self) -> NodeReservations:
        """Returns the known reservations, updated by what the node has allocated since."""

    async def until_read(self) -> None:
        """Waits a short time for reservations that have been made but may not have been received yet."""


Starting = Callable[[ResourceName, Sequence[DeviceID], Poll], Awaitable[None]]
"""Prepares a container with these units of this resource that is about to start."""


async def nothing_to_ask() -> None:
    """An `ensure_fresh` without a `HardwareWatch`: the health counts as confirmed."""


async def nothing_ended() -> Sequence[Allocation]:
    """A `DeviceAllocations.ended` for a node without a kubelet: no allocation is known to have ended."""
    return ()
