"""
The rules of a node's kubelet and what it has allocated, as read by the node's allocator: the fields of `UsageObserved`
that a prediction depends on (`core.admission.prediction`).

What cannot be read is explained in the field that ends in `unknown`, and is never guessed. Fields are never renamed or
re-used, only added, as in `events`. Names of policies and options are plain text, so that one of a later kubelet is no
reason to drop the whole event.

Source: kubelet v1.36.3, KubeletConfiguration v1beta1, the checkpoints of the three managers, PodResources v1.
"""

from typing import Annotated

import msgspec

from topoalign.core.model.allocations import MemoryBlock, MemoryUse
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.topology.cpuset import LARGEST_ID, parse_cpuset

NumaNodeID = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST_ID)]
"""As plugins list it, -1 included. Masks over larger ids would take gigabytes."""


class KubeletRules(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The rules by which the kubelet decides. Names and values are those of its configuration."""

    policy: str
    """Policy of the Topology Manager."""
    scope: str
    """Scope of the Topology Manager: `container` or `pod`."""
    prefer_closest_numa_nodes: bool = False
    """Its option of that name."""
    max_allowable_numa_nodes: int = 8
    """Its option of that name."""
    cpu_manager: str
    """Policy of the CPU manager: `static` or `none`."""
    cpu_options: tuple[str, ...] = ()
    """Options of the static CPU manager that are on, sorted."""
    reserved_cpus: str = ""
    """CPUs kept for the system as a list `0-3,8`."""
    reserved_cpu_count: int = 0
    """How many CPUs the kubelet keeps for the system by its own choice, where `reserved_cpus` names none."""
    memory_manager: str
    """Policy of the memory manager: `Static` or `None`."""
    reserved_memory: dict[NumaNodeID, dict[ResourceName, int]] = {}
    """NUMA node id -> resource -> bytes kept for the system."""
    placement: str
    """Device policy of topoalign's device plugin, which answers the kubelet's GetPreferredAllocation."""
    compat: str = ""
    """Whose answers pods get instead of topoalign's own, as the node is set (`TOPOALIGN_COMPAT`): `gaia`, `hami`."""
    unknown: str = ""
    """Why the kubelet's configuration cannot be read: then these are the allocator's own settings. Empty: it was read."""

    def __post_init__(self) -> None:
        parse_cpuset(self.reserved_cpus)  # as for `Allocation`


class ListedDevices(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Devices of one resource that a plugin lists with the same NUMA nodes."""

    nodes: tuple[NumaNodeID, ...] | None = None
    """The NUMA nodes, ascending. None: listed without topology."""
    ids: tuple[DeviceID, ...]
    """As the plugin lists them, sorted."""


class CheckpointEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the checkpoints of the kubelet's three managers list for one container of a pod that is not gone."""

    pod_uid: str
    """UID of the pod; the checkpoints have no names of pods."""
    container: ContainerName
    """Name of the container."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory and hugepages that are its own."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, those that the allocator gave out among them."""
    mounted: bool = False
    """Whether a volume of its pod is mounted: then the pod runs for sure."""

    def __post_init__(self) -> None:
        parse_cpuset(self.cpus)  # as for `Allocation`


class KubeletObserved(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the node's own prediction depends on, besides topology, health and allocations."""

    version: str = ""
    """The kubelet's version, as configured (`TOPOALIGN_KUBELET_VERSION`). Empty: not known."""
    rules: KubeletRules
    """By which it decides."""
    devices: dict[ResourceName, tuple[ListedDevices, ...]] | None = None
    """Resource -> healthy devices of other plugins (PodResources GetAllocatableResources). None: not known."""
    devices_unknown: str = ""
    """Why `devices` is None."""
    registered: tuple[ResourceName, ...] | None = None
    """Resources that the device checkpoint knows a plugin or a device in use of. None: not known."""
    entries: tuple[CheckpointEntry, ...] = ()
    """What the checkpoints list for pods that are not gone, by UID and container."""
    dropped: dict[AllocationID, dict[ResourceName, tuple[DeviceID, ...]]] = {}
    """Live allocation -> resource -> devices that the checkpoint lists only for pods that are gone: they are free."""
    ended: tuple[AllocationID, ...] = ()
    """Live allocations whose containers have ended for sure, so that the kubelet counts their devices as free."""
    memory: dict[NumaNodeID, MemoryUse] = {}
    """NUMA node id -> what the memory manager has given away of it, and the group that it belongs to."""
    memory_doubt: str = ""
    """What is not certain of `memory`. Empty: nothing."""
    cpus_unknown: str = ""
    """Why `entries` has no CPUs. Empty: they were read."""
    memory_unknown: str = ""
    """Why `entries` and `memory` have no memory. Empty: it was read."""
    checkpoint_unknown: str = ""
    """Why `entries` and `dropped` have no devices. Empty: they were read."""
    pods_unknown: str = ""
    """Why it is not known which pods are gone: all that the checkpoints list counts. Empty: it is known."""
    notes: tuple[str, ...] = ()
    """Which pods are gone, and of which it is not known."""
    started: float | None = None
    """When the kubelet began to listen for plugins, in seconds since 1970. None: not known."""
    settle_seconds: float = 0.0
    """For so long after `started` the kubelet may not know all its pods."""
    stale: str = ""
    """Why this is not what the files list now but what they listed before, and when. Empty: they were read in time."""
    record_doubt: str = ""
    """Why something may be held that is not in the allocator's record, whose journal was damaged. Empty: it is whole."""
    unknown: str = ""
    """Why the files are not known: not read in time, or too large. What PodResources showed last counts instead."""
