"""
Indexes the live allocations of one node: the holders of each holding, the listed devices that are held, and the
holdings that no longer match an offer.

Each index is built once from all allocations, and then updated at each grant and release. The cost of an update depends
on the size of the granted or released allocation, not on the number of all holdings (`persistent_map`). An index is
immutable: an update returns a new index.

`Holders` has a table of shares for each shared device, because thousands of shares may be held. It looks up the GPU or
NIC of each MIG instance and virtual function in `parent_devices`, which includes former ones. If an allocation changes
`parent_devices`, `Holders` is built again instead of updated.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain

from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import (
    SHARE,
    FunctionHolding,
    Holding,
    excluding_holdings,
    holding_of,
    kind_of_share,
    may_have_parts,
    shared_by,
    wholes_of,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet, OfferedDevices
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.persistent_map import PersistentMap

Names = tuple[AllocationID, ...]
"""Ids of the live allocations that hold something, the newest last."""
Held = tuple[Sequence[Holding], Mapping[Holding, Sequence[str]]]
"""The distinct holdings of an allocation: those that are not shares, and shared device -> numbers of held shares."""


class Holders:
    """The holders of each holding of one node."""

    def __init__(self, gpus: Mapping[DeviceID, DeviceID], allocations: Mapping[AllocationID, Allocation]) -> None:
        """`gpus`: the result of `parent_devices`. `allocations`: the live ones, oldest first."""
        self._parents = gpus
        unshared: dict[Holding, Names] = {}
        shares: dict[Holding, dict[str, Names]] = {}
        for name, allocation in allocations.items():
            holdings, numbered = self._read(allocation)
            for holding in holdings:
                unshared[holding] = (*unshared.get(holding, ()), name)
            for base, numbers in numbered.items():
                table = shares.setdefault(base, {})
                for number in numbers:
                    table[number] = (*table.get(number, ()), name)
        self.unshared = PersistentMap(unshared)
        """Holding that is not a share -> its holders."""
        self._shares: Mapping[Holding, Mapping[str, Names]] = shares
        """Shared device -> number of a share -> its holders. No inner table is empty."""
        parts: dict[Holding, dict[Holding, None]] = {}
        for held in (*unshared, *shares):
            for whole in wholes_of(held):
                parts.setdefault(whole, {})[held] = None
        self._parts = PersistentMap({whole: PersistentMap(held) for whole, held in parts.items()})
        """Whole -> its parts that are held or shared, except its shares."""

    def of(self, holding: Holding) -> Names:
        """The holders of exactly this holding, not of its parts or wholes."""
        if (share := shared_by(holding)) is None:
            return self.unshared.get(holding, ())
        return self._shares.get(share[0], NO_SHARES).get(share[1], ())

    def overlaps(self, holding: Holding) -> bool:
        """Whether this holding, a part of it, or a whole that contains it is held."""
        if any(map(self.of, excluding_holdings(holding))):
            return True
        return may_have_parts(holding) and (holding in self._shares or holding in self._parts)

    def inside(self, whole: Holding) -> Iterator[Names]:
        """The holders of each held part of a device, one tuple for each part."""
        yield from self._shares.get(whole, NO_SHARES).values()
        for part in self._parts.get(whole, NO_PARTS):
            yield from self._shares.get(part, NO_SHARES).values()
            if part in self.unshared:
                yield self.unshared[part]

    def granted(self, allocation: Allocation) -> "Holders":
        """The index with this allocation as the newest. The id of the allocation must be new."""
        after = copy(self)
        shares = dict(self._shares)
        name = allocation.id
        holdings, numbered = self._read(allocation)
        for holding in holdings:
            after.unshared = after.unshared.put(holding, (*after.unshared.get(holding, ()), name))
        for base, numbers in numbered.items():
            table = dict(shares.get(base, NO_SHARES))
            for number in numbers:
                table[number] = (*table.get(number, ()), name)
            shares[base] = table
        after._shares = shares
        for held in (*holdings, *numbered):
            for whole in wholes_of(held):
                after._parts = after._parts.put(whole, after._parts.get(whole, NO_PARTS).put(held, None))
        return after

    def released(self, allocation: Allocation) -> "Holders":
        """The index without this allocation, which it must contain."""
        after = copy(self)
        shares = dict(self._shares)
        holdings, numbered = self._read(allocation)
        for holding in holdings:
            others = tuple(name for name in after.unshared[holding] if name != allocation.id)
            after.unshared = after.unshared.put(holding, others) if others else after.unshared.drop(holding)
        for base, numbers in numbered.items():
            table = dict(shares.pop(base))
            for number in numbers:
                others = tuple(name for name in table.pop(number) if name != allocation.id)
                table.update({number: others} if others else {})
            shares.update({base: table} if table else {})
        after._shares = shares
        for gone in dict.fromkeys((*holdings, *numbered)):
            for whole in wholes_of(gone) if gone not in after.unshared and gone not in shares else ():
                left = after._parts[whole].drop(gone)
                after._parts = after._parts.put(whole, left) if left else after._parts.drop(whole)
        return after

    def _read(self, allocation: Allocation) -> Held:
        """The holdings of an allocation, on the GPUs and NICs that the hardware reports for them."""
        unshared = [
            placed_on(self._parents, Holding(nic, FunctionHolding(address)))
            for nic, addresses in allocation.virtual_functions.items()
            for address in addresses
        ]
        shares: dict[Holding, dict[str, None]] = {}
        for given in allocation.given.values():
            unshared += (placed_on(self._parents, holding) for holding in given.unshared)
            for base, numbers in given.shares.items():
                shared = placed_on(self._parents, holding_of(base, allocation.parents))
                shares.setdefault(shared, {}).update(dict.fromkeys(numbers))
        return list(dict.fromkeys(unshared)), {base: list(numbers) for base, numbers in shares.items()}


NO_PARTS: PersistentMap[Holding, None] = PersistentMap({})
NO_SHARES: Mapping[str, Names] = {}


def parent_devices(hardware: Topology, allocations: Mapping[AllocationID, Allocation]) -> Mapping[DeviceID, DeviceID]:
    """Instance or virtual function -> its GPU or NIC, including those that no longer exist but are held."""
    former: dict[DeviceID, DeviceID] = {}
    for held in allocations.values():
        if held.parents:
            former |= held.parents
    now = hardware.parents
    return now if former.keys() <= now.keys() else former | {**now}


def placed_on(gpus: Mapping[DeviceID, DeviceID], holding: Holding) -> Holding:
    """The same holding on the GPU or NIC in `gpus`, because not every record contains it."""
    gpu = gpus.get(holding.base)
    return holding if gpu is None or gpu == holding.device else holding_of(holding.id, gpus)


class HeldDevices:
    """
    The listed devices of a node that live allocations hold, by the kubelet's ids. A device that two resources list is
    held in both. Several allocations may hold the same device if the kubelet has allocated it to a second container.
    """

    def __init__(self, listed: Mapping[ResourceName, OfferedDevices], allocations: Iterable[Allocation]) -> None:
        times = Counter(chain.from_iterable(each.device_ids for each in allocations))
        self.sets: Mapping[ResourceName, DeviceSet] = {name: devices.some(times) for name, devices in listed.items()}
        """Resource -> its held devices."""
        self._times: Mapping[DeviceID, int] = {device: n for device, n in times.items() if n > 1}
        """Device that several allocations hold -> number of these allocations."""

    def granted(self, allocation: Allocation) -> "HeldDevices":
        """The held devices with this allocation, whose id must be new."""
        after = copy(self)
        new = self._listed(allocation.device_ids)
        again = {device for name, some in new.items() for device in some & self.sets[name]}
        if again:
            after._times = {**self._times, **{device: self._times.get(device, 1) + 1 for device in again}}
        after.sets = {**self.sets, **{name: self.sets[name] | some for name, some in new.items()}}
        return after

    def released(self, allocation: Allocation) -> "HeldDevices":
        """The held devices without this allocation, which must be among the holders."""
        after = copy(self)
        kept = allocation.device_ids & self._times.keys()
        if kept:
            fewer = {device: n - (device in kept) for device, n in self._times.items()}
            after._times = {device: n for device, n in fewer.items() if n > 1}
        gone = self._listed(allocation.device_ids - kept)
        after.sets = {**self.sets, **{name: self.sets[name] - some for name, some in gone.items()}}
        return after

    def _listed(self, ids: Iterable[DeviceID]) -> Mapping[ResourceName, DeviceSet]:
        """Resource -> its devices among `ids`, for resources that have any."""
        found = ((name, held.devices.some(ids)) for name, held in self.sets.items())
        return {name: some for name, some in found if some.bits}


Place = tuple[ResourceName, DeviceID]


class FormerOffers:
    """
    The holdings of one node that are no longer offered as allocated, because the offers or the hardware have changed.

    A slot with an amount is not a time slice, although both have the same form of id. If a container holds 100 cores of
    GPU-0 with the slot `GPU-0::0`, no container gets the time slice `GPU-0::1`. In the other direction, a time slice
    counts as a slot with an equal part of the GPU.
    """

    def __init__(
        self,
        hardware: Topology,
        gpus: Mapping[DeviceID, DeviceID],
        allocations: Mapping[AllocationID, Allocation],
    ) -> None:
        """`gpus`: the result of `parent_devices`."""
        self._hardware = hardware
        self._parents = gpus
        holdings: dict[AllocationID, Sequence[Holding]] = {}
        unlisted: dict[AllocationID, Sequence[Place]] = {}
        for name, held in allocations.items():
            former, gone = self._read(held)
            if former:
                holdings[name] = former
            if gone:
                unlisted[name] = gone
        self.holdings: Mapping[AllocationID, Sequence[Holding]] = holdings
        """Allocation -> its holdings that are offered as another resource, differently, or not at all; never empty."""
        self.unlisted: Mapping[AllocationID, Sequence[Place]] = unlisted
        """Allocation -> resources and ids of its devices that are not listed; never empty."""

    def granted(self, allocation: Allocation) -> "FormerOffers":
        """The index with this allocation, whose id must be new; this object if the allocation adds nothing to it."""
        former, unlisted = self._read(allocation)
        if not former and not unlisted:
            return self
        after = copy(self)
        after.holdings = {**self.holdings, allocation.id: former} if former else self.holdings
        after.unlisted = {**self.unlisted, allocation.id: unlisted} if unlisted else self.unlisted
        return after

    def released(self, allocation: Allocation) -> "FormerOffers":
        """The index without this allocation; this object if the allocation is not in it."""
        gone = allocation.id
        if gone not in self.holdings and gone not in self.unlisted:
            return self
        after = copy(self)
        after.holdings = {name: kept for name, kept in self.holdings.items() if name != gone}
        after.unlisted = {name: kept for name, kept in self.unlisted.items() if name != gone}
        return after

    def _read(self, allocation: Allocation) -> tuple[Sequence[Holding], Sequence[Place]]:
        """What an allocation adds to `holdings` and to `unlisted`."""
        former: list[Holding] = []
        unlisted: list[Place] = []
        by_base = self._hardware.offers_by_base
        devices = self._hardware.devices
        co_allocated = allocation.co_allocated
        for resource, given in allocation.given.items():
            for holding in given.unshared:
                offers = by_base.get(holding.base, ())
                if not any(offer.resource == resource and not offer.shared for offer in offers):
                    former.append(holding)
            for base, numbers in given.shares.items():
                now = [offer for offer in by_base.get(base, ()) if offer.resource == resource and offer.shared]
                kinds = {offer.unit for offer in now}
                in_slots = any(offer.slots is not None for offer in now)
                slots: Collection[str] = () if in_slots else allocation.slots
                for number in numbers:
                    if kind_of_share(number) not in kinds or (slots and f"{base}{SHARE}{number}" in slots):
                        former.append(holding_of(DeviceID(f"{base}{SHARE}{number}"), allocation.parents))
        if co_allocated:  # co-allocated devices did not use an offer
            former = [each for each in former if each.id not in co_allocated]
        if self._parents:
            former = [placed_on(self._parents, each) for each in former]
        for resource, held in (allocation.from_kubelet if co_allocated else allocation.devices).items():
            listed = devices.get(resource, NO_DEVICES)
            for device in held:
                if device not in listed:
                    unlisted.append((resource, device))
        return former, unlisted
