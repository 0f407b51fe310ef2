"""What the kubelet front needs of the allocator, what the allocator needs of the kubelet's record, and defaults for both."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from topoalign.core.model.events import Allocation, ContainerUsage, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files.pod_directories import PodDirectories

AskedDevices = Sequence[Collection[DeviceID]]
"""The devices of one Allocate call, by containers: a list, or a set of those that the hardware lists."""


class AllocatorPort(Protocol):
    """The allocator as the kubelet front calls it. Implemented by `allocator.allocate.service.DeviceAllocations`."""

    @property
    def state(self) -> NodeState:
        """What is known of the node now: hardware, health and allocations."""

    @property
    def version(self) -> int:
        """Counts up with every change of `state`."""

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """GPU -> why nothing of it can be given now, whatever its health is: MIG instances cannot be made."""

    async def wait_past(self, version: int) -> None:
        """Waits until `version` is greater than this one. Any number of callers may wait."""

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """
        The best connected set of `size` devices that holds `must_include`, by the node's device policy; () where the
        API has no preference to give (size below 1, too few available, must_include not available or larger than size).
        Devices that a live record holds are in it only where there are not enough others.
        """

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        """
        Records that the kubelet gave these devices, one set per container, with the companions that are reserved with
        them; when this returns it is on disk.

        Raises UnknownDevice, InvalidField (empty or repeated ids), DeviceInUse, CompanionsLacking, NotVisible, StateFault.
        All sets or none.
        """

    def named(self, resource: ResourceName, allocation: Allocation) -> Mapping[ResourceName, tuple[DeviceID, ...]]:
        """
        For an allocation of this resource: resource of companions, and each of GPUs or NICs where the container asks for
        several -> all that its container has of it or is to have, which is what each answer to the container names. Empty
        where one resource has all, and nothing comes together with its GPUs.
        """

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        """
        A container with these devices is about to start. Returns at once if the record has its owner, else after
        PodResources was asked for it. Raises Unavailable, for units of GPUs that are no container's share ShareSplit and
        InvalidShare, and for slots with other amounts than are reserved for the container NotAsReserved.
        """


Place = tuple[ResourceName, DeviceID]
"""A device, and the resource of which the kubelet gives it."""


class ShownDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that a container holds, as PodResources lists them."""

    owner: Owner
    resource: ResourceName
    devices: frozenset[DeviceID]
    pod_uid: str = ""
    """Of its pod, as the checkpoint has it; empty: not known. PodResources itself knows no UIDs."""


class ResourceEntry(NamedTuple):
    """One entry of the checkpoint: the devices of one resource that one container has."""

    resource: ResourceName
    devices: frozenset[DeviceID]
    pod_uid: str = ""
    """Empty: not known."""
    container: str = ""


class KubeletListing(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the kubelet answers at one moment: PodResources, and its checkpoint and pod directories read with it."""

    kubelet: tuple[int, ...]
    """Which kubelet answered: differs after the kubelet has restarted."""
    since: float
    """Wall seconds at which this kubelet began to listen."""
    pods: int
    """How many pods it listed, with devices or without."""
    holdings: tuple[ShownDevices, ...]
    """Of app containers and sidecars: PodResources does not show plain init containers."""
    checkpoint: frozenset[Place] | None
    """Devices that its checkpoint has given to any container, init containers included. None: it cannot be read."""
    parts: tuple[ResourceEntry, ...] = ()
    """The same, apart by container and resource. Entries of pods that are gone stay until the next write."""
    written: tuple[int, ...] = ()
    """Which version of the checkpoint this is; differs after every write."""
    is_own: bool = False
    """Whether the kubelet that answers wrote this version, so that all of it is in its memory, too."""
    directories: PodDirectories | None = None
    """Which pods are gone. None: not known, because their directories cannot be read."""
    usage: tuple[ContainerUsage, ...] = ()
    """All that it shows of each container: CPUs, memory and the devices of every plugin, by owner."""

    @cached_property
    def shown(self) -> Mapping[Place, ShownDevices]:
        """What PodResources shows with a container -> the container. Made once: every live allocation is looked up in it."""
        return {(holding.resource, device): holding for holding in self.holdings for device in holding.devices}

    def shows(self, allocation: Allocation) -> bool:
        """Whether PodResources shows something that the kubelet gave an allocation with a container."""
        given = allocation.from_kubelet.items()
        return any((resource, device) in self.shown for resource, ids in given for device in ids)

    @cached_property
    def parts_by_place(self) -> Mapping[Place, Sequence[ResourceEntry]]:
        """What the checkpoint has given out -> the entries that have it: two where one of them is of a pod that is gone."""
        found: dict[Place, list[ResourceEntry]] = {}
        for part in self.parts:
            for device in part.devices:
                found.setdefault((part.resource, device), []).append(part)
        return found


class Poll(NamedTuple):
    """What the kubelet answered when it was polled, and about what."""

    listing: KubeletListing
    live: frozenset[AllocationID]
    """The allocations that were live when it was asked: an answer says nothing about what was granted since."""
    at: float
    """Monotonic seconds at which it was asked."""


class PodResources(Protocol):
    """The kubelet's own record of who holds what."""

    def written(self) -> tuple[int, ...]:
        """The version of the checkpoint file that is on disk now, as `KubeletListing.written`; () where there is none."""

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        """
        Asks the kubelet what every container holds; it has so many seconds to answer, None: as many as it has always.
        Raises Unavailable.
        """


Starting = Callable[[ResourceName, Sequence[DeviceID], Poll], Awaitable[None]]
"""Prepares a container with these units of this resource that is about to start."""


async def nothing_to_prepare(resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
    """Stands for `Starting` where nothing limits units."""


async def nothing_to_ask() -> None:
    """
    Stands for `HardwareWatch.ensure_fresh` where nothing watches the hardware, as in tests: the health counts as fresh.
    """


async def nothing_ended() -> Sequence[Allocation]:
    """Stands for `DeviceAllocations.ended` on a node without a kubelet: no allocation is known to have ended."""
    return ()
