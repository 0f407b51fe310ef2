"""
Folds the facts that a node published into the state of the node.

The allocator folds its own journal; the registry and every client fold the stream. At start, the facts are folded
again. So there is only one source of truth, and only one way to load it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from itertools import chain
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
    ReservationsChanged,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.memory_account import add_allocation_memory, given_back
from topoalign.core.state.ownership import Ownership
from topoalign.core.state.persistent_map import PersistentMap

R = TypeVar("R", bound=Reading)

TO_FOLLOW = "to follow"
"""Attribute of a state: how to compute `ownership` from that of the state before. Removed when `ownership` is read."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that is known about one node. Frozen: `apply` returns the next state."""

    node: NodeName
    topology: TopologyDiscovered | None = None
    health: DeviceHealthChanged | None = None
    usage: UsageObserved | None = None
    epoch: int = 0
    """Epoch of the allocator's journal; 0 before its first fact."""
    seq: int = 0
    allocations: Mapping[AllocationID, Allocation] = {}
    """The live allocations, oldest first."""
    memory: Mapping[int, MemoryUse] = {}
    """NUMA node id -> its memory in use. Nodes without memory blocks are omitted."""

    def apply(self, event: Event) -> "NodeState":
        """
        Returns the state after this fact. Repetitions change nothing, and neither do reservations
        (`core.state.node_reservations` folds them).

        Raises SequenceGap if facts are missing and Contradiction if a fact cannot be true. A snapshot raises neither.
        """
        match event:
            case TopologyDiscovered():
                return msgspec.structs.replace(self, topology=newer_reading(self.topology, event))
            case DeviceHealthChanged():
                return self.followed(msgspec.structs.replace(self, health=newer_reading(self.health, event)))
            case UsageObserved():
                return self.followed(msgspec.structs.replace(self, usage=newer_reading(self.usage, event)))
            case ReservationsChanged():
                return self
            case _:
                return self.fold(event)

    def fold(self, event: LedgerEvent) -> "NodeState":
        """Returns the state after a fact of the allocator's journal. Raises SequenceGap and Contradiction."""
        if event.epoch == self.epoch and event.seq <= self.seq:
            return self
        if isinstance(event, AllocationsSnapshot):
            live = PersistentMap({allocation.id: allocation for allocation in event.allocations})
            place = {"epoch": event.epoch, "seq": event.seq}
            return msgspec.structs.replace(self, allocations=live, memory=event.memory, **place)
        if event.epoch != self.epoch or event.seq != self.seq + 1:
            raise SequenceGap(self.node, event.epoch, self.seq if event.epoch == self.epoch else 0, event.seq)
        match event:
            case AllocationGranted():
                after = self.holding(event.allocation)
            case AllocationBound():
                after = self.bound(event)
            case AllocationReleased():
                after = self.without(event.allocation)
            case AllocationRefused() | AllocationDeviated():
                after = self
            case _:
                assert_never(event)
        return after.followed(msgspec.structs.replace(after, seq=event.seq))

    def with_ledger_of(self, other: "NodeState") -> "NodeState":
        """Returns this state with the allocations, epoch and seq of another fold of the node."""
        return msgspec.structs.replace(
            self, epoch=other.epoch, seq=other.seq, allocations=other.allocations, memory=other.memory
        )

    def holding(self, allocation: Allocation) -> "NodeState":
        """Returns the state with this allocation as the newest one, with the same seq. Also used during a decision."""
        live = _to_persistent_map(self.allocations).put(allocation.id, allocation)
        after = msgspec.structs.replace(self, allocations=live, memory=add_allocation_memory(self.memory, allocation))
        if (owned := self.owned) is not None and allocation.id not in self.allocations:
            after.__dict__[TO_FOLLOW] = partial(owned.granted, live, allocation)
        return after

    def without(self, gone: AllocationID) -> "NodeState":
        """Returns the state without the allocation, with the same seq; this state if it is not live."""
        if gone not in self.allocations:
            return self
        had = self.allocations[gone]
        live = _to_persistent_map(self.allocations).drop(gone)
        after = msgspec.structs.replace(self, allocations=live, memory=given_back(self.memory, had))
        if (owned := self.owned) is not None:
            after.__dict__[TO_FOLLOW] = partial(owned.released, live, had)
        return after

    def bound(self, event: AllocationBound) -> "NodeState":
        """Returns the state in which an allocation has its owner; same seq. Raises Contradiction if it is not live."""
        if event.allocation not in self.allocations:
            raise Contradiction(self.node, f"allocation {clean(event.allocation)!r} was bound and is not live")
        had = self.allocations[event.allocation]
        bound = msgspec.structs.replace(
            had,
            owner=event.owner,
            boot=event.boot or had.boot,
            pod_uid=event.pod_uid,
            displaced=event.displaced,
            reserved_for=() if event.as_reserved or event.pod_uid in had.reserved_for else had.reserved_for,
            denied="" if event.as_reserved else had.denied,
        )
        live = _to_persistent_map(self.allocations).put(bound.id, bound)
        return self.followed(msgspec.structs.replace(self, allocations=live))

    def followed(self, after: "NodeState") -> "NodeState":
        """Returns `after` with the indexes of this state. Both must have equal allocations and hardware."""
        is_same = (
            after.allocations is self.allocations
            and after.reported_health is self.reported_health
            and after.ended == self.ended
        )
        if is_same and TO_FOLLOW in self.__dict__:
            after.__dict__[TO_FOLLOW] = self.__dict__[TO_FOLLOW]
        elif (owned := self.owned) is not None:
            after.__dict__["ownership"] = owned.unchanged(after.allocations, after.reported_health, after.ended)
        return after

    def listed_as(self, before: "NodeState") -> "NodeState":
        """Returns the state as seen by a kubelet that has not received changes of devices since `before`."""
        after = msgspec.structs.replace(self)
        after.__dict__["ownership"] = self.ownership.listed_as(before.ownership)
        return after

    @property
    def owned(self) -> Ownership | None:
        """`ownership`, if it was computed for this state or an earlier one."""
        return self.ownership if TO_FOLLOW in self.__dict__ else self.__dict__.get("ownership")

    @property
    def hardware(self) -> Topology:
        """The node's topology; an empty one before it is discovered."""
        return self.topology.topology if self.topology is not None else NOTHING

    def health_of(self, device: DeviceID) -> DeviceHealth:
        """The health of a device or share (`holding_health`)."""
        return self.ownership.handed_out.health_of(device)

    @property
    def reported_health(self) -> Mapping[DeviceID, DeviceHealth]:
        """Device -> its health as discovery announced it; empty before the first announcement."""
        return self.health.devices if self.health is not None else {}

    @cached_property
    def ownership(self) -> Ownership:
        """Who holds what, what is free, and what overlaps. Computed when it is first read."""
        following = self.__dict__.pop(TO_FOLLOW, None)
        owned = (self.hardware, self.allocations, self.reported_health, self.ended)
        return following() if following is not None else Ownership(*owned)

    @cached_property
    def ended(self) -> frozenset[AllocationID]:
        """Ids of allocations with ended containers, by the newest usage: the kubelet counts their devices as free."""
        kubelet = self.usage.kubelet if self.usage is not None else None
        if kubelet is None or not (kubelet.ended or kubelet.dropped):
            return frozenset()
        dropped = {name: frozenset(chain(*devices.values())) for name, devices in kubelet.dropped.items()}
        free = (
            name
            for name, devices in dropped.items()
            if name in self.allocations
            and self.allocations[name].device_ids <= devices.union(self.allocations[name].co_allocated)
        )
        return frozenset(kubelet.ended).union(free)

    @cached_property
    def stale(self) -> tuple[AllocationID, ...]:
        """Ids of allocations that were granted before the node's last reboot and have not been confirmed since."""
        boot = self.topology.boot_id if self.topology is not None else ""
        return tuple(name for name, held in self.allocations.items() if boot and held.boot and held.boot != boot)

    def healthy(self, resource: ResourceName) -> DeviceSet:
        """Usable devices of a resource, held or not."""
        return self.ownership.handed_out.healthy(resource)

    def ailing(self, allocation: Allocation) -> dict[DeviceID, DeviceHealth]:
        """The devices of an allocation that are not usable now, with their health."""
        known = {device: self.health_of(device) for device in allocation.device_ids}
        return {device: health for device, health in sorted(known.items()) if not health.usable}

    @cached_property
    def digest(self) -> str:
        """16 hex digits that are equal for equal allocations, to compare two folds."""
        live = sorted(self.allocations.values(), key=lambda allocation: allocation.id)
        body = msgspec.json.encode([live, sorted(self.memory.items())], order="sorted")
        return hashlib.sha256(body).hexdigest()[:16]


NOTHING = Topology()


def initial_state(
    node: NodeName, hardware: Topology, health: Mapping[DeviceID, DeviceHealth], source: str
) -> NodeState:
    """Returns the state of a node that has this hardware and health, and on which nothing is allocated."""
    topology = TopologyDiscovered(node=node, epoch=1, revision=1, boot_id="", source=source, topology=hardware)
    judged = DeviceHealthChanged(node=node, epoch=1, revision=1, devices=dict(health))
    return NodeState(node=node, topology=topology, health=judged)


def _to_persistent_map(allocations: Mapping[AllocationID, Allocation]) -> PersistentMap[AllocationID, Allocation]:
    return allocations if isinstance(allocations, PersistentMap) else PersistentMap(allocations)


def newer_reading(had: R | None, got: R) -> R:
    """The newer of two readings. A repetition, or an earlier revision of the same epoch, is ignored."""
    return had if had is not None and had.epoch == got.epoch and got.revision <= had.revision else got


def replay(node: NodeName, events: Iterable[Event]) -> NodeState:
    """Returns the state after all these facts, starting with an empty state. Raises SequenceGap and Contradiction."""
    state = NodeState(node=node)
    for event in events:
        state = state.apply(event)
    return state
