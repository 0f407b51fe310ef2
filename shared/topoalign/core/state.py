"""
What is known of one node: a fold over the facts it announced.

`NodeState.apply` is the only way anything gets in. The allocator folds its own journal, the registry and every client fold
the stream, and starting up is nothing but folding again, so there is one truth and one way to load it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeVar, assert_never

import msgspec

from topoalign.core.errors import TopoalignError, clean
from topoalign.core.events import (
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
    HealthState,
    LedgerEvent,
    MemoryUse,
    Reading,
    TopologyDiscovered,
)
from topoalign.core.ids import AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.topology.model import Topology

R = TypeVar("R", bound=Reading)

UNKNOWN = DeviceHealth(state=HealthState.UNKNOWN, reason="not judged yet")


class SequenceGap(TopoalignError):
    """Facts are missing between what was folded and this one: ask the writer for a snapshot."""

    code = "SequenceGap"

    def __init__(self, node: NodeName, epoch: int, have: int, got: int) -> None:
        self.node, self.epoch, self.have, self.got = node, epoch, have, got
        super().__init__(
            f"node {node}, epoch {epoch}: fact {got} arrived after fact {have}",
            "a snapshot of the node's allocations heals it",
        )


class Contradiction(TopoalignError):
    """A fact that cannot be true after those before it, such as the owner of an allocation that is not live."""

    code = "Contradiction"

    def __init__(self, node: NodeName, finding: str) -> None:
        self.node = node
        super().__init__(f"node {node}: {finding}", "a snapshot of the node's allocations heals it; look at the writer")


class NodeState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One node as its facts have it. Frozen: `apply` returns the next state and leaves this one as it was."""

    node: NodeName
    topology: TopologyDiscovered | None = None
    health: DeviceHealthChanged | None = None
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
                bound = msgspec.structs.replace(self.allocations[event.allocation], owner=event.owner)
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
        memory = dict(self.memory)
        for block in allocation.memory:
            for node, taken in zip(block.nodes, block.taken, strict=True):
                use = memory.get(node, MemoryUse())
                memory[node] = MemoryUse(
                    reserved=changed(use.reserved, block.resource, taken),
                    cells=block.nodes,
                    assignments=use.assignments + 1,
                )
        return {**self.allocations, allocation.id: allocation}, memory

    def without_allocation(
        self, gone: AllocationID
    ) -> tuple[Mapping[AllocationID, Allocation], Mapping[int, MemoryUse]]:
        if gone not in self.allocations:
            return self.allocations, self.memory
        held = self.allocations[gone]
        allocations = {name: allocation for name, allocation in self.allocations.items() if name != gone}
        memory = dict(self.memory)
        for block in held.memory:
            rest = sum(block.taken)
            for node, taken in zip(block.nodes, block.taken, strict=True):
                use = memory.get(node, MemoryUse())
                back = min(rest, use.reserved.get(block.resource, 0)) if held.lowest_first else taken
                rest -= back
                assignments = max(0, use.assignments - 1)
                memory[node] = MemoryUse(
                    reserved=changed(use.reserved, block.resource, -back),
                    cells=use.cells if assignments else (),
                    assignments=assignments,
                )
                if memory[node] == MemoryUse():
                    del memory[node]
        return allocations, memory

    @property
    def hardware(self) -> Topology:
        """The node's topology; an empty one before it was discovered."""
        return self.topology.topology if self.topology is not None else NOTHING

    def health_of(self, device: DeviceID) -> DeviceHealth:
        return self.health.devices.get(device, UNKNOWN) if self.health is not None else UNKNOWN

    @cached_property
    def holders(self) -> Mapping[DeviceID, AllocationID]:
        """Device -> the newest live allocation that holds it, or a function of it."""
        return {device: name for name, allocation in self.allocations.items() for device in allocation.device_ids}

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
        return tuple(d for d in self.hardware.devices.get(resource, {}) if self.health_of(d).usable)

    def free(self, resource: ResourceName) -> tuple[DeviceID, ...]:
        """Devices of a resource that may be handed out whole now, in the hardware's order."""
        return tuple(device for device in self.healthy(resource) if device not in self.holders)

    @cached_property
    def digest(self) -> str:
        """Equal for equal allocations, whatever way they came about: compare it to know that two folds agree."""
        live = sorted(self.allocations.values(), key=lambda allocation: allocation.id)
        body = msgspec.json.encode([live, sorted(self.memory.items())], order="sorted")
        return hashlib.sha256(body).hexdigest()[:16]


NOTHING = Topology()


def changed(reserved: Mapping[ResourceName, int], resource: ResourceName, by: int) -> dict[ResourceName, int]:
    """The same with so many bytes more or less; what is at zero is not listed, so that equal states look alike."""
    amounts = {**reserved, resource: max(0, reserved.get(resource, 0) + by)}
    return {name: amount for name, amount in amounts.items() if amount}


def newer(had: R | None, got: R) -> R:
    """Of two readings the later: a repetition or an earlier revision of the same epoch changes nothing."""
    return had if had is not None and had.epoch == got.epoch and got.revision <= had.revision else got


def replay(node: NodeName, events: Iterable[Event]) -> NodeState:
    """The state after all these facts, from nothing."""
    state = NodeState(node=node)
    for event in events:
        state = state.apply(event)
    return state
