"""
The rules of a node's kubelet and what it has allocated, as read by the node's allocator: the fields of `UsageObserved`
that a prediction depends on (`core.admission.prediction`).

Data that cannot be read is never guessed: a field whose name ends in `unknown` has the reason. Fields are never renamed
or re-used, only added, as in `events`. Names of policies and options are plain text, so an unknown name of a later
kubelet does not make the event invalid.

Source: kubelet v1.36.3, KubeletConfiguration v1beta1, the checkpoints of the three managers, PodResources v1.
"""

from typing import Annotated

import msgspec

from topoalign.core.model.allocations import MemoryBlock, MemoryUse
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.topology.cpuset import LARGEST_ID, parse_cpuset

NumaNodeID = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST_ID)]
"""An id as plugins list it, including -1. Masks with larger ids would need gigabytes."""


class KubeletRules(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The rules by which the kubelet decides. Names and values are those of its configuration."""

    policy: str
    """Policy of the Topology Manager."""
    scope: str
    """Scope of the Topology Manager: `container` or `pod`."""
    prefer_closest_numa_nodes: bool = False
    """Topology Manager option `prefer-closest-numa-nodes`."""
    max_allowable_numa_nodes: int = 8
    """Topology Manager option `max-allowable-numa-nodes`."""
    cpu_manager: str
    """Policy of the CPU manager: `static` or `none`."""
    cpu_options: tuple[str, ...] = ()
    """Options of the static CPU manager that are on, sorted."""
    reserved_cpus: str = ""
    """CPUs that are reserved for the system, as a list `0-3,8`."""
    reserved_cpu_count: int = 0
    """Number of CPUs that the kubelet chooses and reserves for the system if `reserved_cpus` is empty."""
    memory_manager: str
    """Policy of the memory manager: `Static` or `None`."""
    reserved_memory: dict[NumaNodeID, dict[ResourceName, int]] = {}
    """NUMA node id -> resource -> bytes that are reserved for the system."""
    placement: str
    """Device policy of topoalign's device plugin, which answers the kubelet's GetPreferredAllocation."""
    compat: str = ""
    """The node's `TOPOALIGN_COMPAT`: `gaia` or `hami`, whose rules topoalign applies. Empty: topoalign's own rules."""
    unknown: str = ""
    """Why the kubelet's configuration cannot be read. Then the allocator's settings apply. Empty: it was read."""

    def __post_init__(self) -> None:
        parse_cpuset(self.reserved_cpus)  # as for `Allocation`


class ListedDevices(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Devices of one resource that a plugin lists with the same NUMA nodes."""

    nodes: tuple[NumaNodeID, ...] | None = None
    """The NUMA nodes, ascending. None: listed without topology."""
    ids: tuple[DeviceID, ...]
    """As the plugin lists them, sorted."""


class CheckpointEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The entries for one container of an existing pod in the checkpoints of the kubelet's three managers."""

    pod_uid: str
    """UID of the pod. The checkpoints do not have its name."""
    container: ContainerName
    """Name of the container."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`."""
    memory: tuple[MemoryBlock, ...] = ()
    """Exclusive memory and hugepages."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, also those that topoalign allocated."""
    mounted: bool = False
    """Whether a volume of its pod is mounted. If so, the pod certainly runs."""

    def __post_init__(self) -> None:
        parse_cpuset(self.cpus)  # as for `Allocation`


class KubeletObserved(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The data on which the node's own predictions depend, in addition to topology, health and allocations."""

    version: str = ""
    """The kubelet's version, as configured (`TOPOALIGN_KUBELET_VERSION`). Empty: unknown."""
    rules: KubeletRules
    """The rules by which it decides."""
    devices: dict[ResourceName, tuple[ListedDevices, ...]] | None = None
    """Resource -> healthy devices of other plugins (PodResources GetAllocatableResources). None: unknown."""
    devices_unknown: str = ""
    """Why `devices` is None."""
    registered: tuple[ResourceName, ...] | None = None
    """Resources for which the device checkpoint has a plugin or an allocated device. None: unknown."""
    entries: tuple[CheckpointEntry, ...] = ()
    """The checkpoint entries of existing pods, sorted by UID and container."""
    dropped: dict[AllocationID, dict[ResourceName, tuple[DeviceID, ...]]] = {}
    """Live allocation -> resource -> its free devices: the checkpoint lists them only for deleted pods."""
    ended: tuple[AllocationID, ...] = ()
    """Live allocations whose containers have certainly ended, so that the kubelet counts their devices as free."""
    memory: dict[NumaNodeID, MemoryUse] = {}
    """NUMA node id -> the memory that the memory manager has allocated there, and the node's group."""
    memory_doubt: str = ""
    """Why `memory` is not certain. Empty: it is certain."""
    cpus_unknown: str = ""
    """Why `entries` has no CPUs. Empty: they were read."""
    memory_unknown: str = ""
    """Why `entries` and `memory` have no memory. Empty: it was read."""
    checkpoint_unknown: str = ""
    """Why `entries` and `dropped` have no devices. Empty: they were read."""
    pods_unknown: str = ""
    """Why it is unknown which pods are deleted. If it is, all checkpoint entries count. Empty: it is known."""
    notes: tuple[str, ...] = ()
    """Which pods are deleted, and for which pods this is unknown."""
    started: float | None = None
    """When the kubelet began to listen for plugins, in seconds since 1970. None: unknown."""
    settle_seconds: float = 0.0
    """Number of seconds after `started` during which the kubelet might not list all its pods."""
    stale: str = ""
    """Why the data is from an earlier reading of the files, with its time. Empty: the files were read in time."""
    record_doubt: str = ""
    """Why allocations may be missing in the allocator's record after damage to its journal. Empty: it is complete."""
    unknown: str = ""
    """Why the files could not be read: too slow or too large. If so, the last answer of PodResources counts instead."""
