"""
Answers who holds what of a node, what is left of it, and what overlaps.

`state.ownership` is the only source for these questions; the state itself only folds. The ownership of the next state shares
all data that a fact does not change (`holders`). No GPU is allocated twice, however it is divided: if the whole GPU is held,
its shares and instances are not free, and if one of these is held, the whole GPU is not free.

    held: GPU-0, GPU-1::2, MIG-0 (of GPU-2)
    overlap with the first: GPU-0, GPU-0::1; with the second: GPU-1; with the third: GPU-2, MIG-0::0; with none: GPU-1::0
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
"""Indexes that follow each grant and release after they were first read."""


class Ownership:
    """Answers who holds what of one node at one moment. Each answer is computed when it is first read."""

    def __init__(
        self,
        hardware: Topology,
        allocations: Mapping[AllocationID, Allocation],
        reported_health: Mapping[DeviceID, DeviceHealth],
        ended: frozenset[AllocationID] = frozenset(),
    ) -> None:
        """`allocations`: the live ones, oldest first. `ended`: those of them whose containers have ended."""
        self._hardware = hardware
        self._allocations = allocations
        self._reported = reported_health
        self._ended = ended
        self._free: dict[ResourceName, DeviceSet] = {}

    def granted(self, allocations: Mapping[AllocationID, Allocation], new: Allocation) -> "Ownership":
        """Who holds what after `new`, whose id no allocation had, became the newest of these `allocations`."""
        return self._successor(allocations, self._reported, self._ended, new, methodcaller("granted", new))

    def released(self, allocations: Mapping[AllocationID, Allocation], gone: Allocation) -> "Ownership":
        """Who holds what after `gone` has ended, which leaves these `allocations`."""
        return self._successor(allocations, self._reported, self._ended, gone, methodcaller("released", gone))

    def unchanged(
        self,
        allocations: Mapping[AllocationID, Allocation],
        reported_health: Mapping[DeviceID, DeviceHealth],
        ended: frozenset[AllocationID],
    ) -> "Ownership":
        """Who holds what where these `allocations` hold what they held before, under this health, and these have ended."""
        return self._successor(allocations, reported_health, ended, None, lambda index: index)

    def listed_as(self, before: "Ownership") -> "Ownership":
        """The same to a kubelet that has not received changes of devices since `before`, on this hardware."""
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
        """Starts from what somebody has asked for already, each index as it follows the change."""
        after = type(self)(self._hardware, allocations, reported_health, ended)
        if changed is not None and not changed.parents.keys() <= self._hardware.parents.keys():
            return after  # it affects how other records are read
        known = {name: follow(index) for name in INDEXES if (index := self.__dict__.get(name)) is not None}
        if "_parents" in self.__dict__:
            known["_parents"] = self._parents
        if "co_allocated" in self.__dict__ and (changed is None or not changed.co_allocated):
            known["co_allocated"] = self.co_allocated
        is_same = "_former" in known and known["_former"] is self._former and reported_health is self._reported
        if is_same and "handed_out" in self.__dict__:
            spent = after.spent_gpus if is_by_amounts(self._hardware) else frozenset[DeviceID]()
            # the shares that are not to be had stay the same as well
            if not is_by_amounts(self._hardware) or (
                spent == self.spent_gpus and (changed is None or spent.isdisjoint(changed.shared_bases))
            ):
                known |= {"handed_out": self.handed_out, "blocked": self.blocked}
        after.__dict__.update(known)
        return after

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device as it is handed out -> the newest live allocation that holds it, or a virtual function of it."""
        return {device: name for name, allocation in self._allocations.items() for device in allocation.device_ids}

    def holding(self, device: DeviceID) -> Holding:
        """The holding that an id stands for, by the hardware; a part that is gone, by its GPU when it was given."""
        return holding_of(device, self._parents)

    def overlapping(self, holdings: Iterable[Holding]) -> list[AllocationID]:
        """Ids of the live allocations that hold one of these, a part of one, or a whole of which one is a part. Sorted."""
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
        """Whether a live allocation holds something that overlaps what this id stands for."""
        return self._index.overlaps(self.holding(device))

    def set_of(self, devices: Iterable[DeviceID]) -> HoldingSet:
        """The holdings that these ids stand for, as a set that can be asked what overlaps it."""
        return HoldingSet(map(self.holding, devices))

    def parents_of(self, devices: Iterable[DeviceID]) -> dict[DeviceID, DeviceID]:
        """Part -> its GPU, for those of the devices that are parts; without the numbers of shares."""
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
        Devices that are offered, but held as a part or a whole under a former offer of another resource: they wait
        until that is released. Of a GPU of which somebody has a share, no MIG instance is to be had, either.

        Numbers of shares that are no longer offered block nothing: their GPU is shared as before.
        """
        if not self._former.holdings:
            return frozenset()
        former: Iterable[Holding] = chain.from_iterable(self._former.holdings.values())
        if self._hardware.parents:  # MIG instances, of which such a GPU has none to be had
            former = (shared[0] if (shared := shared_by(each)) is not None else each for each in former)
        held = HoldingSet(former)
        return frozenset(base for base in self._hardware.offers_by_base if held.overlaps(self.holding(base)))

    @cached_property
    def co_allocated(self) -> frozenset[DeviceID]:
        """Offered devices of which a container holds something that the kubelet did not give it, and must give to nobody."""
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
        """The ids that allocations hold of a resource although they are offered no more. Sorted."""
        held = self._former.unlisted.values()
        return sorted({device for places in held for name, device in places if name == resource})

    @property
    def former_resources(self) -> set[ResourceName]:
        """All resources of the allocations that hold something which is not offered now as it was given."""
        names = self._former.holdings.keys() | self._former.unlisted.keys()
        return {resource for name in names for resource in self._allocations[name].devices}

    @cached_property
    def handed_out(self) -> HandedOut:
        """The health of everything that is offered; blocked devices are not to be handed out."""
        spent = {}
        by_amounts = {each.resource for each in self._hardware.offered if each.unit or each.slots}
        for resource in by_amounts if self.spent_gpus else ():
            devices = self._hardware.devices[resource]
            units = devices.some(unit for gpu in self.spent_gpus for unit in devices.by_base.get(gpu, ()))
            spent[resource] = units - self.held(resource)
        return HandedOut(self._hardware, self._reported, self.blocked, spent)

    @cached_property
    def spent_gpus(self) -> frozenset[DeviceID]:
        """The GPUs in units or slots of which nothing is left, without counting containers that have ended."""
        live = self._allocations.values()
        running = [each for name, each in self._allocations.items() if name not in self._ended] if self._ended else live
        return spent_unit_gpus(self._hardware, running) | spent_slots(self._hardware, live, running)

    def held(self, resource: ResourceName) -> DeviceSet:
        """Devices of a resource that some live allocation holds under their ids, or of which it holds a virtual function."""
        return self._held.sets.get(resource, NO_DEVICES.everything)

    def usable(self, resource: ResourceName) -> DeviceSet:
        """Devices of a resource that are healthy and not co-allocated, held or not."""
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
        """Devices that some allocation holds as a whole, and not only a part of them."""
        return frozenset(holding.device for holding in self._index.unshared if isinstance(holding.part, Whole))

    @cached_property
    def units_left(self) -> Mapping[DeviceID, ShareLeft]:
        """GPU -> what is left of it, for those that are offered in units."""
        return units_left(self._hardware, self._allocations.values(), self.handed_out)

    @cached_property
    def slots_left(self) -> Mapping[DeviceID, ShareLeft]:
        """GPU -> what is left of it, for those that are offered in slots."""
        return slots_left(self._hardware, self._allocations.values(), self.handed_out)

    @cached_property
    def functions_in_use(self) -> frozenset[str]:
        """PCI addresses of the virtual functions that an allocation holds."""
        return frozenset(each.part.address for each in self._index.unshared if isinstance(each.part, FunctionHolding))

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        """Ids of the CPUs that a container has exclusively."""
        return frozenset().union(*(allocation.cpu_ids for allocation in self._allocations.values()))
