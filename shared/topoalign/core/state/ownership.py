"""
Computes which allocations hold which devices of a node, which devices are free, and which holdings overlap.

`NodeState.ownership` is the only source of these answers. The state itself only folds facts. The ownership of the next
state reuses all data that a fact does not change (`holders`). No GPU is allocated twice, however it is divided: if the
whole GPU is held, its shares and instances are not free. If one of these is held, the whole GPU is not free.

    held: GPU-0, GPU-1::2, MIG-0 (of GPU-2)
    overlap with GPU-0: GPU-0, GPU-0::1
    overlap with GPU-1::2: GPU-1
    overlap with MIG-0: GPU-2, MIG-0::0
    no overlap: GPU-1::0
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import methodcaller

from topoalign.core.model.events import Allocation, DeviceHealth
from topoalign.core.model.holdings import (
    FunctionHolding,
    Holding,
    HoldingSet,
    Whole,
    base_of,
    excluding_holdings,
    holding_of,
    may_have_parts,
    shared_by,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import is_by_amounts
from topoalign.core.state.holders import FormerOffers, HeldDevices, Holders, parent_devices
from topoalign.core.state.holding_health import HandedOut
from topoalign.core.state.share_amounts import (
    ShareLeft,
    slots_left,
    spent_slots,
    spent_unit_gpus,
    units_left,
)

INDEXES = ("_index", "_former", "_held")
"""Indexes that are updated at each grant and release after they are first read."""


class Ownership:
    """The holdings of one node at one moment. Each property is computed when it is first read."""

    def __init__(
        self,
        hardware: Topology,
        allocations: Mapping[AllocationID, Allocation],
        reported_health: Mapping[DeviceID, DeviceHealth],
        ended: frozenset[AllocationID] = frozenset(),
    ) -> None:
        """`allocations`: the live ones, oldest first. `ended`: ids of those whose containers have ended."""
        self._hardware = hardware
        self._allocations = allocations
        self._reported = reported_health
        self._ended = ended
        self._free: dict[ResourceName, DeviceSet] = {}

    def granted(self, allocations: Mapping[AllocationID, Allocation], new: Allocation) -> "Ownership":
        """The ownership after `new` is granted. `allocations` contains it as the newest one. Its id must be new."""
        return self._successor(allocations, self._reported, self._ended, new, methodcaller("granted", new))

    def released(self, allocations: Mapping[AllocationID, Allocation], gone: Allocation) -> "Ownership":
        """The ownership after `gone` is released. `allocations`: the remaining ones."""
        return self._successor(allocations, self._reported, self._ended, gone, methodcaller("released", gone))

    def unchanged(
        self,
        allocations: Mapping[AllocationID, Allocation],
        reported_health: Mapping[DeviceID, DeviceHealth],
        ended: frozenset[AllocationID],
    ) -> "Ownership":
        """The ownership with this health and these ended allocations, if the `allocations` hold the same as before."""
        return self._successor(allocations, reported_health, ended, None, lambda index: index)

    def listed_as(self, before: "Ownership") -> "Ownership":
        """The ownership as seen by a kubelet that has not received device changes since `before`, on this hardware."""
        after = self.unchanged(self._allocations, self._reported, self._ended)
        after.__dict__.update(handed_out=before.handed_out, blocked=before.blocked)
        return after

    def _successor(
        self,
        allocations: Mapping[AllocationID, Allocation],
        reported_health: Mapping[DeviceID, DeviceHealth],
        ended: frozenset[AllocationID],
        changed: Allocation | None,
        follow: Callable[[object], object],
    ) -> "Ownership":
        """The next ownership, with the computed properties that are still valid. `follow` updates an index."""
        after = type(self)(self._hardware, allocations, reported_health, ended)
        if changed is not None and not changed.parents.keys() <= self._hardware.parents.keys():
            return after  # it affects how the ids in other allocations are read
        known = {name: follow(index) for name in INDEXES if (index := self.__dict__.get(name)) is not None}
        if "_parents" in self.__dict__:
            known["_parents"] = self._parents
        if "co_allocated" in self.__dict__ and (changed is None or not changed.co_allocated):
            known["co_allocated"] = self.co_allocated
        is_same = "_former" in known and known["_former"] is self._former and reported_health is self._reported
        if is_same and "handed_out" in self.__dict__:
            spent = after.spent_gpus if is_by_amounts(self._hardware) else frozenset[DeviceID]()
            # the shares that cannot be allocated stay the same as well
            if not is_by_amounts(self._hardware) or (
                spent == self.spent_gpus and (changed is None or spent.isdisjoint(changed.shared_bases))
            ):
                known |= {"handed_out": self.handed_out, "blocked": self.blocked}
        after.__dict__.update(known)
        return after

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device id, as allocated -> the newest live allocation that holds the device or a virtual function of it."""
        return {device: name for name, allocation in self._allocations.items() for device in allocation.device_ids}

    def holding(self, device: DeviceID) -> Holding:
        """The holding for a device id. For a part that no longer exists, the GPU is that of its allocation."""
        return holding_of(device, self._parents)

    def overlapping(self, holdings: Iterable[Holding]) -> list[AllocationID]:
        """Sorted ids of the live allocations that hold one of these, a part of one, or a whole that contains one."""
        found: set[AllocationID] = set()
        for holding in filter(self._index.overlaps, holdings):
            found.update(names[-1] for way in excluding_holdings(holding) if (names := self._index.of(way)))
            if may_have_parts(holding):
                found.update(names[-1] for names in self._index.inside(holding))
        return sorted(found)

    @property
    def holds_anything(self) -> bool:
        """Whether there is a live allocation."""
        return bool(self._allocations)

    def is_held(self, device: DeviceID) -> bool:
        """Whether a holding of a live allocation overlaps the holding for this device id."""
        return self._index.overlaps(self.holding(device))

    def set_of(self, devices: Iterable[DeviceID]) -> HoldingSet:
        """The holdings for these device ids, as a set that detects overlaps."""
        return HoldingSet(map(self.holding, devices))

    def parents_of(self, devices: Iterable[DeviceID]) -> dict[DeviceID, DeviceID]:
        """Part -> its GPU, for the devices that are parts. Share numbers are removed from the ids."""
        gpus = self._hardware.parents
        return {base: gpus[base] for base in map(base_of, devices) if base in gpus} if gpus else {}

    @cached_property
    def _parents(self) -> Mapping[DeviceID, DeviceID]:
        return parent_devices(self._hardware, self._allocations)

    @cached_property
    def _index(self) -> Holders:
        return Holders(self._parents, self._allocations)

    @cached_property
    def _former(self) -> FormerOffers:
        return FormerOffers(self._hardware, self._parents, self._allocations)

    @cached_property
    def _held(self) -> HeldDevices:
        return HeldDevices(self._hardware.devices, self._allocations.values())

    @cached_property
    def blocked(self) -> frozenset[DeviceID]:
        """
        Offered devices that cannot be allocated, because an allocation from a former offer holds them, a part of them,
        or a whole that contains them. They stay blocked until its release. A held share from a former offer also blocks
        the MIG instances of its GPU.

        A share whose number is no longer offered blocks nothing if its GPU is still shared in the same way.
        """
        if not self._former.holdings:
            return frozenset()
        former: Iterable[Holding] = chain.from_iterable(self._former.holdings.values())
        if self._hardware.parents:  # a share blocks the MIG instances of its GPU
            former = (shared[0] if (shared := shared_by(each)) is not None else each for each in former)
        held = HoldingSet(former)
        return frozenset(base for base in self._hardware.offers_by_base if held.overlaps(self.holding(base)))

    @cached_property
    def co_allocated(self) -> frozenset[DeviceID]:
        """Offered devices that overlap co-allocated devices of a container. The kubelet must not allocate them."""
        having = [each for each in self._allocations.values() if each.co_allocated]
        if not having:
            return frozenset()
        held = HoldingSet(
            holding
            for each in having
            for device in each.co_allocated
            for holding in map(self.holding, map(DeviceID, each.virtual_functions.get(device, (device,))))
        )
        return frozenset(base for base in self._hardware.offers_by_base if held.overlaps(self.holding(base)))

    def unlisted(self, resource: ResourceName) -> list[DeviceID]:
        """Sorted ids of the resource's devices that allocations hold although they are no longer offered."""
        held = self._former.unlisted.values()
        return sorted({device for places in held for name, device in places if name == resource})

    @property
    def former_resources(self) -> set[ResourceName]:
        """All resources of the allocations that hold something that is no longer offered as it was allocated."""
        names = self._former.holdings.keys() | self._former.unlisted.keys()
        return {resource for name in names for resource in self._allocations[name].devices}

    @cached_property
    def handed_out(self) -> HandedOut:
        """The health of everything that is offered. Blocked devices are unhealthy."""
        spent = {}
        by_amounts = {each.resource for each in self._hardware.offered if each.unit or each.slots}
        for resource in by_amounts if self.spent_gpus else ():
            devices = self._hardware.devices[resource]
            units = devices.some(unit for gpu in self.spent_gpus for unit in devices.by_base.get(gpu, ()))
            spent[resource] = units - self.held(resource)
        return HandedOut(self._hardware, self._reported, self.blocked, spent)

    @cached_property
    def spent_gpus(self) -> frozenset[DeviceID]:
        """The GPUs in units or slots without free capacity. Containers that have ended do not count."""
        live = self._allocations.values()
        running = [each for name, each in self._allocations.items() if name not in self._ended] if self._ended else live
        return spent_unit_gpus(self._hardware, running) | spent_slots(self._hardware, live, running)

    def held(self, resource: ResourceName) -> DeviceSet:
        """Devices of a resource that live allocations hold by their ids, as a whole or by a virtual function."""
        return self._held.sets.get(resource, NO_DEVICES.everything)

    def usable(self, resource: ResourceName) -> DeviceSet:
        """Devices of a resource that are healthy and not co-allocated, whether held or free."""
        healthy = self.handed_out.healthy(resource)
        for base in self.co_allocated & healthy.devices.by_base.keys() if self.co_allocated else ():
            healthy -= healthy.devices.by_base[base]
        return healthy

    def free(self, resource: ResourceName) -> DeviceSet:
        """Devices of a resource that can be allocated whole now."""
        if resource not in self._free:
            self._free[resource] = self.usable(resource) - self.held(resource)
        return self._free[resource]

    @cached_property
    def held_whole(self) -> frozenset[DeviceID]:
        """Devices that an allocation holds as a whole."""
        return frozenset(holding.device for holding in self._index.unshared if isinstance(holding.part, Whole))

    @cached_property
    def units_left(self) -> Mapping[DeviceID, ShareLeft]:
        """GPU in units -> its offered, held and free amounts."""
        return units_left(self._hardware, self._allocations.values(), self.handed_out)

    @cached_property
    def slots_left(self) -> Mapping[DeviceID, ShareLeft]:
        """GPU in slots -> its offered, held and free amounts."""
        return slots_left(self._hardware, self._allocations.values(), self.handed_out)

    @cached_property
    def functions_in_use(self) -> frozenset[str]:
        """PCI addresses of the virtual functions that an allocation holds."""
        return frozenset(each.part.address for each in self._index.unshared if isinstance(each.part, FunctionHolding))

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        """Ids of the CPUs that are allocated exclusively."""
        return frozenset().union(*(allocation.cpu_ids for allocation in self._allocations.values()))
