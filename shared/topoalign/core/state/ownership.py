"""
Who holds what of a node, what is left of it, and what overlaps.

`Ownership` is read from a `NodeState` (`state.ownership`) and is the only one that answers these questions; the state itself
only folds. No card is given twice, however it is divided: a GPU that is held whole keeps back its shares and its instances,
and one of them keeps back the whole GPU.

    held: GPU-0, GPU-1::2, MIG-0 (of GPU-2)
    overlap with the first: GPU-0, GPU-0::1; with the second: GPU-1; with the third: GPU-2, MIG-0::0; with none: GPU-1::0
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from topoalign.core.model.events import Allocation, DeviceHealth
from topoalign.core.model.holdings import (
    WHOLE,
    Function,
    Holding,
    HoldingSet,
    TimeSlice,
    Whole,
    base_of,
    excluding,
    handed_out,
    holding_of,
    may_have_parts,
    wholes_of,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.device_health import HandedOut


class Ownership:
    """Answers who holds what of one node at one moment. Each answer is computed when it is first asked for."""

    def __init__(
        self,
        hardware: Topology,
        allocations: Mapping[AllocationID, Allocation],
        told: Mapping[DeviceID, DeviceHealth],
    ) -> None:
        """`allocations`: the live ones, oldest first. `told`: health as discovery announced it."""
        self._hardware, self._allocations, self._told = hardware, allocations, told
        self._free: dict[ResourceName, tuple[DeviceID, ...]] = {}

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device as it is handed out -> the newest live allocation that holds it, or a virtual function of it."""
        return {device: name for name, allocation in self._allocations.items() for device in allocation.device_ids}

    def holding(self, device: DeviceID) -> Holding:
        """The holding that an id stands for, by the hardware; a part that is gone, by its card when it was given."""
        return holding_of(device, self._cards)

    def overlapping(self, holdings: Iterable[Holding]) -> list[AllocationID]:
        """
        Ids of the live allocations that hold one of these, a whole of which one is a part, or a part of one: after a
        change of what is offered, `GPU-x::1` overlaps `GPU-x`. Sorted.
        """
        found: set[AllocationID] = set()
        for holding in holdings:
            found.update(self._holders[way] for way in excluding(holding) if way in self._holders)
            if may_have_parts(holding):
                found.update(self._part_holders.get(holding, ()))
        return sorted(found)

    def is_held(self, device: DeviceID) -> bool:
        """Whether a live allocation holds something that overlaps what this id stands for."""
        holding = self.holding(device)
        if any(way in self._holders for way in excluding(holding)):
            return True
        return may_have_parts(holding) and holding in self._part_holders

    def set_of(self, devices: Iterable[DeviceID]) -> HoldingSet:
        """The holdings that these ids stand for, as a set that tells what overlaps it."""
        return HoldingSet(map(self.holding, devices))

    def left(self, card: DeviceID) -> tuple[Holding, ...]:
        """What is offered of a GPU or NIC and overlaps nothing held, healthy or not, in the order of the offers."""
        offered = (
            self.holding(device)
            for offer in self._hardware.offered
            for base in offer.devices
            if self._hardware.card_of(base) == card
            for device in handed_out(base, offer.replicas)
        )
        return tuple(holding for holding in offered if not self.overlapping([holding]))

    def cards_of(self, devices: Iterable[DeviceID]) -> dict[DeviceID, DeviceID]:
        """Part -> its card, for those of the devices that are parts; without the numbers of shares."""
        cards = self._hardware.cards
        return {base: cards[base] for base in map(base_of, devices) if base in cards}

    @cached_property
    def _cards(self) -> Mapping[DeviceID, DeviceID]:
        """Instance or virtual function -> its card, those that are gone but held included."""
        former = {part: card for held in self._allocations.values() for part, card in held.cards.items()}
        now = self._hardware.cards
        return now if former.keys() <= now.keys() else former | {**now}

    def _placed(self, holding: Holding) -> Holding:
        """The same on the card that the hardware shows: not every record has it."""
        card = self._cards.get(holding.base)
        return holding if card is None or card == holding.device else self.holding(holding.id)

    @cached_property
    def _holders(self) -> Mapping[Holding, AllocationID]:
        """What is held -> the newest live allocation that holds it."""
        holders: dict[Holding, AllocationID] = {}
        for name, held in self._allocations.items():
            whole = self._cards.keys().isdisjoint(held.bases)  # thousands of shares need not be placed one by one
            holders.update(dict.fromkeys(held.holdings if whole else map(self._placed, held.holdings), name))
        return holders

    @cached_property
    def _part_holders(self) -> Mapping[Holding, Sequence[AllocationID]]:
        """A whole -> the live allocations that hold something which is a part of it."""
        parts: dict[Holding, list[AllocationID]] = {}
        for holding, name in self._holders.items():
            for whole in wholes_of(holding):
                parts.setdefault(whole, []).append(name)
        return parts

    @cached_property
    def blocked(self) -> frozenset[DeviceID]:
        """
        Devices that are offered, but held as a part or a whole under a former offer of another resource: they wait
        until that is released.

        Numbers of shares that are no longer offered block nothing: their card is shared as before.
        """
        former = [
            self._placed(holding)
            for allocation in self._allocations.values()
            for resource, given in allocation.given.items()
            for holding in given
            if not self._is_offered(holding, resource)
        ]
        if not former:
            return frozenset()
        held = HoldingSet(former)
        return frozenset(base for base in self._hardware.offer_by_base if held.overlaps(self.holding(base)))

    def _is_offered(self, holding: Holding, resource: ResourceName) -> bool:
        """Whether it is offered now as it was given: under this resource, and shared in time or not."""
        offer = self._hardware.offer_by_base.get(holding.base)
        shared = holding.part is not WHOLE and isinstance(holding.part, TimeSlice)
        return offer is not None and (offer.resource, offer.replicas > 1) == (resource, shared)

    @cached_property
    def handed_out(self) -> HandedOut:
        """The health of everything that is offered; blocked devices are not to be handed out."""
        return HandedOut(self._hardware, self._told, self.blocked)

    def free(self, resource: ResourceName) -> tuple[DeviceID, ...]:
        """Devices of a resource that may be handed out whole now, in the hardware's order."""
        if resource not in self._free:
            free = (device for device in self.handed_out.healthy(resource) if device not in self.holders)
            self._free[resource] = tuple(free)
        return self._free[resource]

    @cached_property
    def held_whole(self) -> frozenset[DeviceID]:
        """Devices that some allocation holds as a whole, and not only a part of them."""
        return frozenset(holding.device for holding in self._holders if isinstance(holding.part, Whole))

    @cached_property
    def functions_in_use(self) -> frozenset[str]:
        """PCI addresses of the virtual functions that an allocation holds."""
        return frozenset(each.part.address for each in self._holders if isinstance(each.part, Function))

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        """Ids of the CPUs that a container has exclusively."""
        return frozenset().union(*(allocation.cpu_ids for allocation in self._allocations.values()))
