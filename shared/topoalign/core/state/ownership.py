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
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import base_of, is_share
from topoalign.core.state.device_health import HandedOut


class Ownership:
    """Of one node at one moment. Each answer is worked out when it is first asked for."""

    def __init__(
        self,
        hardware: Topology,
        allocations: Mapping[AllocationID, Allocation],
        told: Mapping[DeviceID, DeviceHealth],
    ) -> None:
        """`allocations`: the live ones, oldest first. `told`: what discovery says of health."""
        self._hardware, self._allocations, self._told = hardware, allocations, told

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device as it is handed out -> the newest live allocation that holds it, or a virtual function of it."""
        return {device: name for name, allocation in self._allocations.items() for device in allocation.device_ids}

    def overlapping(self, devices: Iterable[DeviceID]) -> list[AllocationID]:
        """
        The live allocations that hold one of these devices, the whole of which one is a part, or a part of one: after a
        change of what is offered, `GPU-x::1` overlaps `GPU-x`. In order of their names.
        """
        found: set[AllocationID] = set()
        for device in devices:
            found.update(self._whole_holders[way] for way in self.ways_to(device) if way in self._whole_holders)
            if not is_share(device):
                found.update(self._part_holders.get(device, ()))
        return sorted(found)

    def ways_to(self, device: DeviceID) -> tuple[DeviceID, ...]:
        """The device, and what it is a part of; of an instance that is gone, what it was a part of when it was given."""
        base = base_of(device)
        card = self._hardware.cards.get(base) or self._former_cards.get(base, base)
        return tuple(dict.fromkeys((device, base, card)))

    def cards_of(self, devices: Iterable[DeviceID]) -> dict[DeviceID, DeviceID]:
        """Those of the devices, without the numbers of shares, that are parts -> what they are parts of."""
        cards = self._hardware.cards
        return {base: cards[base] for base in map(base_of, devices) if base in cards}

    @cached_property
    def _former_cards(self) -> Mapping[DeviceID, DeviceID]:
        return {part: card for held in self._allocations.values() for part, card in held.cards.items()}

    @cached_property
    def _whole_holders(self) -> Mapping[DeviceID, AllocationID]:
        """What was handed out -> the newest live allocation that holds it as it was handed out."""
        return {
            device: name
            for name, held in self._allocations.items()
            for device in (*held.whole_ids, *map(DeviceID, held.function_addresses))
        }

    @cached_property
    def _part_holders(self) -> Mapping[DeviceID, Sequence[AllocationID]]:
        """A device -> the live allocations that hold something which is a part of it."""
        parts: dict[DeviceID, list[AllocationID]] = {}
        for device, name in self._whole_holders.items():
            for whole in self.ways_to(device)[1:]:
                parts.setdefault(whole, []).append(name)
        return parts

    @cached_property
    def blocked(self) -> frozenset[DeviceID]:
        """
        What is offered, but is held under a former offer, of another resource, as a part or a whole: it waits until that is
        released.

        Numbers of shares that are no longer offered block nothing: their card is shared as before.
        """
        offered = self._hardware.offer_by_base
        former = {
            held
            for allocation in self._allocations.values()
            for resource, devices in allocation.devices.items()
            for held in allocation.whole_ids.intersection(devices)
            if (offer := offered.get(base_of(held))) is None
            or (offer.resource, offer.replicas > 1) != (resource, is_share(held))
        }
        if not former:
            return frozenset()
        wholes = {way for held in former for way in self.ways_to(held)}
        return frozenset(base for base in offered if base in wholes or not former.isdisjoint(self.ways_to(base)))

    @cached_property
    def handed_out(self) -> HandedOut:
        """The health of everything that is offered; what is blocked is not to be handed out."""
        return HandedOut(self._hardware, self._told, self.blocked)

    def free(self, resource: ResourceName) -> tuple[DeviceID, ...]:
        """Devices of a resource that may be handed out whole now, in the hardware's order."""
        return tuple(device for device in self.handed_out.healthy(resource) if device not in self.holders)

    @cached_property
    def held_whole(self) -> frozenset[DeviceID]:
        """Devices that some allocation holds as a whole, and not only functions of it."""
        return frozenset().union(*(allocation.whole_ids for allocation in self._allocations.values()))

    @cached_property
    def functions_in_use(self) -> frozenset[str]:
        """PCI addresses of the virtual functions that some allocation holds."""
        return frozenset().union(*(allocation.function_addresses for allocation in self._allocations.values()))

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        """CPUs that some container has to itself."""
        return frozenset().union(*(allocation.cpu_ids for allocation in self._allocations.values()))
