"""
Types of which facts about allocations consist: which container holds what.

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
"""A plain init container, a sidecar that runs on together with the app containers, or an app container."""


class Owner(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Names the container that holds an allocation. A pod that is created again has the same names."""

    namespace: Namespace
    """Namespace of the pod."""
    pod: PodName
    """Name of the pod."""
    container: ContainerName
    """Name of the container within the pod."""


OWNER_CHARACTERS = 400
"""Of an owner as text: its three names have 63, 253 and 63, and pods of one controller differ in their last ones."""


class MemoryBlock(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Memory or hugepages of one size, from a group of NUMA nodes."""

    resource: ResourceName
    """`memory`, or hugepages of one size such as `hugepages-2Mi`."""
    nodes: tuple[int, ...]
    """The group, ascending."""
    size: int
    """Bytes. Smaller than asked, down to 0, for an init container whose memory later containers of its pod reuse."""
    taken: tuple[int, ...]
    """How `size` is spread over `nodes`. Reused memory counts here, and no longer in the init container's block."""

    def __post_init__(self) -> None:
        """Raises ValueError unless each node has an amount."""
        if len(self.nodes) != len(self.taken):
            raise ValueError(f"memory of {len(self.nodes)} NUMA nodes with {len(self.taken)} amounts")


class Displaced(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A former allocation whose container was not seen to end when the kubelet gave its devices to another container."""

    allocation: AllocationID
    """The id that it had; it is released as `displaced`."""
    owner: Owner
    """Its container."""
    pod_uid: str = ""
    """UID of its pod; empty: not known."""
    devices: dict[ResourceName, tuple[DeviceID, ...]]
    """Those that both containers have, by resource."""
    slots: dict[DeviceID, Amount] = {}
    """Slot of a GPU among them -> what this container holds of that GPU by it; one that is not here: an equal part."""
    instances: dict[DeviceID, DeviceID] = {}
    """Slot of a GPU among them -> uuid of the MIG instance that was created for this container."""

    @property
    def device_ids(self) -> frozenset[DeviceID]:
        """Ids of all devices."""
        return frozenset[DeviceID]().union(*self.devices.values())


class ResourceGrant(msgspec.Struct, frozen=True):
    """What was given of one resource."""

    unshared: Sequence[Holding]
    """What is no share, on the GPUs that the record names (`Ownership` knows the node's as well)."""
    shares: Mapping[DeviceID, Sequence[str]]
    """GPU, MIG instance or virtual function -> the numbers of its shares."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """What one container holds. Granted over the kubelet's protocol it is one resource, without CPUs and memory."""

    id: AllocationID
    """Names the allocation for as long as it lives; `AllocationBound` and `AllocationReleased` repeat it."""
    owner: Owner | None = None
    """None until it is known: the kubelet's Allocate does not name the container."""
    role: Role = "app"
    """Which kind of container it is: an init container, a sidecar (an init container that is restarted), or any other."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, in the order in which the container sees them."""
    virtual_functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of the SR-IOV functions that are held; of a NIC that is not here, all is held."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory and hugepages that are its own. Empty where the kubelet gives out memory by itself."""
    affinity: tuple[int, ...] | None = None
    """NUMA node ids it was aligned to, ascending. None: the policy had no preference, or the kubelet did not report it."""
    lowest_first: bool = False
    """Whether memory returns to the lowest NUMA node first, as in the kubelet; otherwise to where it was taken."""
    boot: str = ""
    """The boot of the node in which it was given, or last confirmed (`TopologyDiscovered.boot_id`); empty: not known."""
    parents: dict[DeviceID, DeviceID] = {}
    """MIG instance or virtual function -> its GPU or NIC at the grant: the container keeps its device node."""
    machine: str = ""
    """The described machine it was given on (`TopologyDiscovered.machine`); empty: real hardware, or not known."""
    pod_uid: str = ""
    """UID of the owner's pod, as the kubelet's checkpoint has it; empty: not known, as on a node without a kubelet."""
    displaced: tuple[Displaced, ...] = ()
    """Whose devices these are as well, as far as is known: those containers were not seen to end."""
    co_allocated: tuple[DeviceID, ...] = ()
    """Those of the devices that the kubelet did not give: their plugin lists them as unhealthy until the release."""
    slots: dict[DeviceID, Amount] = {}
    """Slot among the devices -> what it holds of its GPU. One that is not here holds an equal part."""

    instances: dict[DeviceID, DeviceID] = {}
    """Slot of a GPU among the devices -> uuid of the MIG instance that was created for it."""
    reserved_for: tuple[str, ...] = ()
    """
    UIDs of the pods for which these amounts were reserved, until it is known whose container this is. A container of another
    pod does not start. Empty: it was reserved for this container, or these are equal parts, which every container may have,
    or it is not known.
    """
    denied: str = ""
    """
    UID of a pod that must not start with these slots. Its init container, which had some of them before, was given amounts
    that were reserved for others, or others were given what was reserved for it. Empty: there is none.
    """

    def __post_init__(self) -> None:
        """Raises ValueError for a bad list of CPUs, and for parts, slots or functions of devices that are not held."""
        parse_cpuset(self.cpus)  # so that a reader that folds a record from outside need not check again
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
        """Ids of the exclusive CPUs, parsed once: every decision reads those of all allocations."""
        return parse_cpuset(self.cpus)

    @cached_property
    def device_ids(self) -> frozenset[DeviceID]:
        """Ids of all devices, including NICs of which the allocation holds only virtual functions."""
        return frozenset[DeviceID]().union(*self.devices.values())

    @cached_property
    def from_kubelet(self) -> Mapping[ResourceName, tuple[DeviceID, ...]]:
        """Resource -> devices without the co-allocated ones, of which a kubelet knows nothing."""
        if not self.co_allocated:
            return self.devices
        rest = {
            resource: tuple(device for device in ids if device not in self.co_allocated)
            for resource, ids in self.devices.items()
        }
        return {resource: ids for resource, ids in rest.items() if ids}

    @cached_property
    def given(self) -> Mapping[ResourceName, ResourceGrant]:
        """What was given of each resource, under the ids offered; without NICs of which it has functions only."""
        found: dict[ResourceName, ResourceGrant] = {}
        for resource, devices in self.devices.items():
            unshared: list[Holding] = []
            shares: dict[DeviceID, list[str]] = {}
            for device in devices:
                if device in self.virtual_functions:
                    continue
                base, share, number = device.partition(SHARE)  # not by functions: they may be hundreds of units
                if share:
                    shares.setdefault(DeviceID(base), []).append(number)
                else:
                    unshared.append(holding_of(device, self.parents))
            found[resource] = ResourceGrant(unshared, shares)
        return found

    @cached_property
    def amounts(self) -> Mapping[DeviceID, Amount]:
        """GPU -> how much of it is held in units, for the GPUs of which any is."""
        return amounts_of(self.device_ids)

    @cached_property
    def shared_bases(self) -> frozenset[DeviceID]:
        """The devices, MIG instances and virtual functions of which it has shares, units or slots."""
        return frozenset(base for given in self.given.values() for base in given.shares)

    @cached_property
    def whole_ids(self) -> frozenset[DeviceID]:
        """Ids of the devices, as they were handed out, of which nobody else can hold a part."""
        return self.device_ids - self.virtual_functions.keys()

    @cached_property
    def function_addresses(self) -> frozenset[str]:
        """PCI addresses of all virtual functions that the allocation holds."""
        parts = (holding.part for given in self.given.values() for holding in given.unshared)
        whole = (part.address for part in parts if isinstance(part, FunctionHolding))
        return frozenset(whole).union(*self.virtual_functions.values())


class MemoryUse(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the memory manager knows of one NUMA node beyond its size."""

    reserved: dict[ResourceName, int] = {}
    """Bytes held by containers."""
    cells: tuple[int, ...] = ()
    """The group the node was last allocated with; empty: the node alone."""
    assignments: int = 0
    """Blocks that touch the node, counted once per resource."""


MOST_COUNTED = 8
"""Sets of ids of which is remembered how much they are: those of the Allocate calls that come together."""


def amounts_of(devices: Iterable[DeviceID]) -> Mapping[DeviceID, Amount]:
    """GPU -> how much of it these ids are units of. An id counts once; what is offered now does not matter."""
    return one_of_each(frozenset(devices))


@lru_cache(MOST_COUNTED)
def one_of_each(devices: frozenset[DeviceID]) -> Mapping[DeviceID, Amount]:
    """The same of a set. While an Allocate is judged and recorded it is asked five times for the same units."""
    found: dict[DeviceID, list[int]] = {}
    for device in devices:
        base, _, label = device.partition(SHARE)
        if (kind := kind_of_share(label)) is not None:
            found.setdefault(DeviceID(base), [0, 0])[kind == "memory"] += 1
    return MappingProxyType(
        {gpu: Amount(cores=cores, memory=blocks * MEMORY_BLOCK) for gpu, (cores, blocks) in sorted(found.items())}
    )
