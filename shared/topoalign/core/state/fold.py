"""
What is known of one node: a fold over the facts it announced.

`NodeState.apply` is the only way anything gets in. The allocator folds its own journal, the registry and every client fold
the stream, and starting up is nothing but folding again, so there is one truth and one way to load it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar, assert_never

import msgspec

from topoalign.core.model.errors import Contradiction, SequenceGap, clean
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    Event,
    LedgerEvent,
    MemoryUse,
    Reading,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import base_of, is_share
from topoalign.core.state.device_health import HandedOut
from topoalign.core.state.memory import given_back, taken

R = TypeVar("R", bound=Reading)


class NodeState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One node as its facts have it. Frozen: `apply` returns the next state and leaves this one as it was."""

    node: NodeName
    topology: TopologyDiscovered | None = None
    health: DeviceHealthChanged | None = None
    usage: UsageObserved | None = None
    epoch: int = 0
    """Of the allocator's journal; 0 before its first fact."""
    seq: int = 0
    allocations: Mapping[AllocationID, Allocation] = {}
    """The live ones, oldest first."""
    memory: Mapping[int, MemoryUse] = {}
    """NUMA node id -> use; a node that no block touches is absent."""

    def apply(self, event: Event) -> "NodeState":
        """
        The state after this fact. A repetition changes nothing.

        Raises SequenceGap where facts are missing, and Contradiction for one that cannot be true; a snapshot never does.
        """
        match event:
            case TopologyDiscovered():
                return msgspec.structs.replace(self, topology=newer(self.topology, event))
            case DeviceHealthChanged():
                return msgspec.structs.replace(self, health=newer(self.health, event))
            case UsageObserved():
                return msgspec.structs.replace(self, usage=newer(self.usage, event))
            case _:
                return self.fold(event)

    def fold(self, event: LedgerEvent) -> "NodeState":
        if event.epoch == self.epoch and event.seq <= self.seq:
            return self
        if isinstance(event, AllocationsSnapshot):
            live = {allocation.id: allocation for allocation in event.allocations}
            return self.moved(event, live, event.memory)
        if event.epoch != self.epoch or event.seq != self.seq + 1:
            raise SequenceGap(self.node, event.epoch, self.seq if event.epoch == self.epoch else 0, event.seq)
        match event:
            case AllocationGranted():
                return self.moved(event, *self.with_allocation(event.allocation))
            case AllocationBound():
                if event.allocation not in self.allocations:
                    raise Contradiction(self.node, f"allocation {clean(event.allocation)!r} was bound and is not live")
                had = self.allocations[event.allocation]
                bound = msgspec.structs.replace(
                    had,
                    owner=event.owner,
                    boot=event.boot or had.boot,
                    pod_uid=event.pod_uid,
                    displaced=event.displaced,
                )
                return self.moved(event, {**self.allocations, event.allocation: bound}, self.memory)
            case AllocationReleased():
                return self.moved(event, *self.without_allocation(event.allocation))
            case AllocationRefused() | AllocationDeviated():
                return self.moved(event, self.allocations, self.memory)
            case _:
                assert_never(event)

    def moved(
        self, event: LedgerEvent, allocations: Mapping[AllocationID, Allocation], memory: Mapping[int, MemoryUse]
    ) -> "NodeState":
        return msgspec.structs.replace(self, epoch=event.epoch, seq=event.seq, allocations=allocations, memory=memory)

    def holding(self, allocation: Allocation) -> "NodeState":
        """This state if the allocation were live: what a decision that is still going on looks at."""
        allocations, memory = self.with_allocation(allocation)
        return msgspec.structs.replace(self, allocations=allocations, memory=memory)

    def with_allocation(
        self, allocation: Allocation
    ) -> tuple[Mapping[AllocationID, Allocation], Mapping[int, MemoryUse]]:
        return {**self.allocations, allocation.id: allocation}, taken(self.memory, allocation)

    def without_allocation(
        self, gone: AllocationID
    ) -> tuple[Mapping[AllocationID, Allocation], Mapping[int, MemoryUse]]:
        if gone not in self.allocations:
            return self.allocations, self.memory
        allocations = {name: allocation for name, allocation in self.allocations.items() if name != gone}
        return allocations, given_back(self.memory, self.allocations[gone])

    @property
    def hardware(self) -> Topology:
        """The node's topology; an empty one before it was discovered."""
        return self.topology.topology if self.topology is not None else NOTHING

    def health_of(self, device: DeviceID) -> DeviceHealth:
        """Of anything that is handed out, by the rule of `device_health`."""
        return self.handed_out.health_of(device)

    @property
    def told(self) -> Mapping[DeviceID, DeviceHealth]:
        """What discovery says of health, as it says it; nothing before it has spoken."""
        return self.health.devices if self.health is not None else {}

    @cached_property
    def handed_out(self) -> HandedOut:
        """The health of everything that is offered."""
        return HandedOut(self.hardware, self.told, self.blocked)

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device -> the newest live allocation that holds it, or a function of it."""
        return {device: name for name, allocation in self.allocations.items() for device in allocation.device_ids}

    def overlapping(self, devices: Iterable[DeviceID]) -> list[AllocationID]:
        """
        The live allocations that hold one of these devices, the whole of which one is a part, or a part of one: after a
        change of what is offered, `GPU-x::1` overlaps `GPU-x`. In order of their names.
        """
        found: set[AllocationID] = set()
        for device in devices:
            found.update(self.whole_holders[way] for way in self.ways_to(device) if way in self.whole_holders)
            if not is_share(device):
                found.update(self.part_holders.get(device, ()))
        return sorted(found)

    def ways_to(self, device: DeviceID) -> tuple[DeviceID, ...]:
        """The device, and what it is a part of; of an instance that is gone, what it was a part of when it was given."""
        base = base_of(device)
        card = self.hardware.cards.get(base) or self.former_cards.get(base, base)
        return tuple(dict.fromkeys((device, base, card)))

    def cards_of(self, devices: Iterable[DeviceID]) -> dict[DeviceID, DeviceID]:
        """Those of the devices, without the numbers of shares, that are parts -> what they are parts of."""
        cards = self.hardware.cards
        return {base: cards[base] for base in map(base_of, devices) if base in cards}

    @cached_property
    def former_cards(self) -> Mapping[DeviceID, DeviceID]:
        return {part: card for held in self.allocations.values() for part, card in held.cards.items()}

    @cached_property
    def whole_holders(self) -> Mapping[DeviceID, AllocationID]:
        """What was handed out -> the newest live allocation that holds it as it was handed out."""
        return {
            device: name
            for name, held in self.allocations.items()
            for device in (*held.whole_ids, *map(DeviceID, held.function_addresses))
        }

    @cached_property
    def part_holders(self) -> Mapping[DeviceID, Sequence[AllocationID]]:
        """A device -> the live allocations that hold something which is a part of it."""
        parts: dict[DeviceID, list[AllocationID]] = {}
        for device, name in self.whole_holders.items():
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
        offered = self.hardware.offer_by_base
        former = {
            held
            for allocation in self.allocations.values()
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
    def stale(self) -> tuple[AllocationID, ...]:
        """Allocations from before the node's last reboot whose containers have not been seen since."""
        boot = self.topology.boot_id if self.topology is not None else ""
        return tuple(name for name, held in self.allocations.items() if boot and held.boot and held.boot != boot)

    @cached_property
    def held_whole(self) -> frozenset[DeviceID]:
        """Devices that some allocation holds as a whole, and not only functions of it."""
        return frozenset().union(*(allocation.whole_ids for allocation in self.allocations.values()))

    @cached_property
    def functions_in_use(self) -> frozenset[str]:
        """PCI addresses of the virtual functions that some allocation holds."""
        return frozenset().union(*(allocation.function_addresses for allocation in self.allocations.values()))

    @cached_property
    def cpus_in_use(self) -> frozenset[int]:
        """CPUs that some container has to itself."""
        return frozenset().union(*(allocation.cpu_ids for allocation in self.allocations.values()))

    def healthy(self, resource: ResourceName) -> tuple[DeviceID, ...]:
        """Devices of a resource that may be handed out, busy or not, in the hardware's order."""
        listed = self.hardware.devices.get(resource, {})
        return tuple(device for device in listed if self.handed_out.health_of(device).usable)

    def free(self, resource: ResourceName) -> tuple[DeviceID, ...]:
        """Devices of a resource that may be handed out whole now, in the hardware's order."""
        return tuple(device for device in self.healthy(resource) if device not in self.holders)

    def ailing(self, allocation: Allocation) -> dict[DeviceID, DeviceHealth]:
        """What an allocation holds that would not be handed out now: it keeps them, and somebody should look."""
        known = {device: self.health_of(device) for device in allocation.device_ids}
        return {device: health for device, health in sorted(known.items()) if not health.usable}

    @cached_property
    def digest(self) -> str:
        """Equal for equal allocations, whatever way they came about: compare it to know that two folds agree."""
        live = sorted(self.allocations.values(), key=lambda allocation: allocation.id)
        body = msgspec.json.encode([live, sorted(self.memory.items())], order="sorted")
        return hashlib.sha256(body).hexdigest()[:16]


NOTHING = Topology()


def newer(had: R | None, got: R) -> R:
    """Of two readings the later: a repetition or an earlier revision of the same epoch changes nothing."""
    return had if had is not None and had.epoch == got.epoch and got.revision <= had.revision else got


def replay(node: NodeName, events: Iterable[Event]) -> NodeState:
    """The state after all these facts, from nothing."""
    state = NodeState(node=node)
    for event in events:
        state = state.apply(event)
    return state
