"""
The types that facts about allocations contain: which container holds which devices, CPUs and memory.

Fields are never renamed or re-used, only added, as in `events`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal

import msgspec

from topoalign.core.model.holdings import (
    SHARE,
    Amount,
    FunctionHolding,
    Holding,
    holding_of,
    kind_of_share,
)
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK

Role = Literal["init", "sidecar", "app"]
"""A plain init container, a sidecar, which keeps running with the app containers, or an app container."""


class Owner(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Names the container that holds an allocation. A pod that is created again has the same names."""

    namespace: Namespace
    """Namespace of the pod."""
    pod: PodName
    """Name of the pod."""
    container: ContainerName
    """Name of the container within the pod."""


OWNER_CHARACTERS = 400
"""
Maximum length of an owner as text. The three names have at most 63, 253 and 63 characters. Pods of one controller
differ only at the end of their names, so the text must not be cut.
"""


class MemoryBlock(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Memory or hugepages of one size, from a group of NUMA nodes."""

    resource: ResourceName
    """`memory`, or hugepages of one size such as `hugepages-2Mi`."""
    nodes: tuple[int, ...]
    """The group, ascending."""
    size: int
    """Bytes. Less than requested, down to 0, if later containers of the pod reuse memory of this init container."""
    taken: tuple[int, ...]
    """Bytes on each of `nodes`. Their sum is `size`. Reused memory counts in the block of the reusing container."""

    def __post_init__(self) -> None:
        """Raises ValueError unless each node has an amount."""
        if len(self.nodes) != len(self.taken):
            raise ValueError(f"memory of {len(self.nodes)} NUMA nodes with {len(self.taken)} amounts")


class Displaced(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A former allocation. The kubelet gave its devices to another container before the end of its own was noticed."""

    allocation: AllocationID
    """Its id. It was released with reason `displaced`."""
    owner: Owner
    """Its container."""
    pod_uid: str = ""
    """UID of its pod; empty: unknown."""
    devices: dict[ResourceName, tuple[DeviceID, ...]]
    """Resource -> the devices that both containers have."""
    slots: dict[DeviceID, Amount] = {}
    """Slot in `devices` -> the amount of its GPU that this container holds. A slot that is missing holds an equal part."""
    instances: dict[DeviceID, DeviceID] = {}
    """Slot in `devices` -> uuid of the MIG instance that was created for this container."""

    @property
    def device_ids(self) -> frozenset[DeviceID]:
        """Ids of all devices."""
        return frozenset[DeviceID]().union(*self.devices.values())


class ResourceGrant(msgspec.Struct, frozen=True):
    """The devices of one resource in an allocation."""

    unshared: Sequence[Holding]
    """
    Devices and parts that are not shares. Parts that `Allocation.parents` does not contain have no GPU or NIC here;
    `placed_on` (`core.state.holders`) adds it from the hardware.
    """
    shares: Mapping[DeviceID, Sequence[str]]
    """GPU, MIG instance or virtual function -> the numbers of its shares."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """What one container holds. If the kubelet's Allocate granted it: devices of one resource and co-allocated ones."""

    id: AllocationID
    """Identifies the allocation until it is released, also in `AllocationBound` and `AllocationReleased`."""
    owner: Owner | None = None
    """None: not known yet. The kubelet's Allocate does not name the container."""
    role: Role = "app"
    """The kind of container: an init container, a sidecar (a restartable init container), or an app container."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, in the order in which the container sees them."""
    virtual_functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of the allocated SR-IOV functions. A NIC that is missing is allocated as a whole."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Exclusive memory and hugepages. Empty on a node whose kubelet allocates the memory."""
    affinity: tuple[int, ...] | None = None
    """Ids of the NUMA nodes that it is aligned to, ascending. None: the policy had no preference, or unknown."""
    lowest_first: bool = False
    """
    Whether released memory is returned to the lowest NUMA node first, as in the kubelet. If not, it is returned to the
    nodes from which it was allocated.
    """
    boot: str = ""
    """The boot in which it was granted or last confirmed (`TopologyDiscovered.boot_id`); empty: unknown."""
    parents: dict[DeviceID, DeviceID] = {}
    """MIG instance or virtual function -> its GPU or NIC when it was granted. The container keeps that device node."""
    machine: str = ""
    """The described machine when the grant was made (`TopologyDiscovered.machine`); empty: real hardware or unknown."""
    pod_uid: str = ""
    """UID of the owner's pod in the kubelet's checkpoint; empty: unknown, as on a node without a kubelet."""
    displaced: tuple[Displaced, ...] = ()
    """Former holders that may still use some of these devices, because the end of their containers was not noticed."""
    co_allocated: tuple[DeviceID, ...] = ()
    """The `devices` that the kubelet did not allocate. Their plugin lists them as unhealthy until the release."""
    slots: dict[DeviceID, Amount] = {}
    """Slot in `devices` -> the amount of its GPU that it holds. A slot that is missing holds an equal part."""

    instances: dict[DeviceID, DeviceID] = {}
    """Slot in `devices` -> uuid of the MIG instance that was created for it."""
    reserved_for: tuple[str, ...] = ()
    """
    UIDs of the pods for which these amounts were reserved, until the owner is known. If the owner is another pod, the
    container does not start. Empty: the amounts were reserved for this container, they are equal parts, which every
    container may have, or it is unknown for whom they were reserved.
    """
    denied: str = ""
    """
    UID of a pod that must not start with these slots. Either its init container, which had some of them, got amounts
    that were reserved for another pod, or another pod got the amounts that were reserved for this one. Empty: no pod.
    """

    def __post_init__(self) -> None:
        """Raises ValueError for a bad list of CPUs, and for parts, slots or functions of devices that are not held."""
        parse_cpuset(self.cpus)  # so code that folds records from outside does not have to check it again
        if self.virtual_functions and (
            not self.virtual_functions.keys() <= self.device_ids or not all(self.virtual_functions.values())
        ):
            raise ValueError("virtual functions of a NIC that is not among the devices, or none of one that is")
        if self.co_allocated and not self.device_ids.issuperset(self.co_allocated):
            raise ValueError("co-allocated devices that are not among the devices")
        if self.slots and not self.slots.keys() <= self.device_ids:
            raise ValueError("slots that are not among the devices")
        if self.instances and not self.instances.keys() <= self.device_ids:
            raise ValueError("instances of slots that are not among the devices")

    @cached_property
    def cpu_ids(self) -> frozenset[int]:
        """Ids of the exclusive CPUs. Parsed only once, because every decision reads the CPUs of all allocations."""
        return parse_cpuset(self.cpus)

    @cached_property
    def device_ids(self) -> frozenset[DeviceID]:
        """Ids of all devices, including NICs of which the allocation holds only virtual functions."""
        return frozenset[DeviceID]().union(*self.devices.values())

    @cached_property
    def from_kubelet(self) -> Mapping[ResourceName, tuple[DeviceID, ...]]:
        """Resource -> devices that the kubelet allocated, without the co-allocated ones."""
        if not self.co_allocated:
            return self.devices
        rest = {
            resource: tuple(device for device in ids if device not in self.co_allocated)
            for resource, ids in self.devices.items()
        }
        return {resource: ids for resource, ids in rest.items() if ids}

    @cached_property
    def given(self) -> Mapping[ResourceName, ResourceGrant]:
        """Resource -> its devices, by the ids that are offered. NICs with allocated virtual functions are omitted."""
        found: dict[ResourceName, ResourceGrant] = {}
        for resource, devices in self.devices.items():
            unshared: list[Holding] = []
            shares: dict[DeviceID, list[str]] = {}
            for device in devices:
                if device in self.virtual_functions:
                    continue
                base, share, number = device.partition(SHARE)  # inlined for speed: there may be hundreds of units
                if share:
                    shares.setdefault(DeviceID(base), []).append(number)
                else:
                    unshared.append(holding_of(device, self.parents))
            found[resource] = ResourceGrant(unshared, shares)
        return found

    @cached_property
    def amounts(self) -> Mapping[DeviceID, Amount]:
        """GPU -> the amount of it that is held in units. GPUs without units are omitted."""
        return amounts_of(self.device_ids)

    @cached_property
    def shared_bases(self) -> frozenset[DeviceID]:
        """The devices, MIG instances and virtual functions of its shares, units and slots."""
        return frozenset(base for given in self.given.values() for base in given.shares)

    @cached_property
    def whole_ids(self) -> frozenset[DeviceID]:
        """Ids of all devices, except NICs of which the allocation holds only virtual functions."""
        return self.device_ids - self.virtual_functions.keys()

    @cached_property
    def function_addresses(self) -> frozenset[str]:
        """PCI addresses of all virtual functions that the allocation holds."""
        parts = (holding.part for given in self.given.values() for holding in given.unshared)
        whole = (part.address for part in parts if isinstance(part, FunctionHolding))
        return frozenset(whole).union(*self.virtual_functions.values())


class MemoryUse(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The memory of one NUMA node that containers use, as counted by the kubelet's memory manager."""

    reserved: dict[ResourceName, int] = {}
    """Bytes held by containers."""
    cells: tuple[int, ...] = ()
    """The group of NUMA nodes with which the node was last allocated; empty: only the node itself."""
    assignments: int = 0
    """Number of memory blocks on the node. Each resource of a container is a block of its own."""


MOST_COUNTED = 8
"""Number of sets of ids whose amounts are cached: enough for the Allocate calls that arrive at the same time."""


def amounts_of(devices: Iterable[DeviceID]) -> Mapping[DeviceID, Amount]:
    """GPU -> the amount of the units among these ids. Each id counts once. The present offers do not matter."""
    return one_of_each(frozenset(devices))


@lru_cache(MOST_COUNTED)
def one_of_each(devices: frozenset[DeviceID]) -> Mapping[DeviceID, Amount]:
    """As `amounts_of`, cached: one Allocate needs the amounts of the same units five times."""
    found: dict[DeviceID, list[int]] = {}
    for device in devices:
        base, _, label = device.partition(SHARE)
        if (kind := kind_of_share(label)) is not None:
            found.setdefault(DeviceID(base), [0, 0])[kind == "memory"] += 1
    return MappingProxyType(
        {gpu: Amount(cores=cores, memory=blocks * MEMORY_BLOCK) for gpu, (cores, blocks) in sorted(found.items())}
    )
