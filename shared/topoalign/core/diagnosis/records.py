"""
What is known of a cluster, as facts: one record for each node, from which every answer about it follows.

A record has the newest reading of each kind, the live allocations, and what is reserved for pods that the node has not shown
yet. `state_of` folds them, so a record that is kept in a file gives the same answers anywhere and at any time.
"""

import msgspec

from topoalign.core.demand.node_filters import NodeTraits
from topoalign.core.model.events import (
    AllocationsSnapshot,
    DeviceHealthChanged,
    ReservationsChanged,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import NodeName
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is known of one node. What was never heard is None."""

    node: NodeName
    topology: TopologyDiscovered | None = None
    health: DeviceHealthChanged | None = None
    usage: UsageObserved | None = None
    allocations: AllocationsSnapshot | None = None
    """All that are live."""
    reserved: tuple[Reservation, ...] = ()
    """What is reserved and not shown by the node, part by part; `seconds_left` as of the time of the record."""
    silent: bool = False
    """Whether its allocator did not answer at the time of the record."""
    foreign: str = ""
    """Code of the reason why it is not offered because others give out its GPUs (`foreign`); empty: nobody does."""
    traits: NodeTraits | None = None
    """Its labels, taints and cordon in Kubernetes. None: they were not read, or Kubernetes has no such node."""

    def __post_init__(self) -> None:
        """Raises ValueError for facts of another node."""
        facts = (self.topology, self.health, self.usage, self.allocations)
        if any(fact is not None and fact.node != self.node for fact in facts):
            raise ValueError("a fact of another node")


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a cluster at one moment."""

    time: float
    """Wall seconds."""
    nodes: tuple[NodeRecord, ...]
    """By name."""

    @property
    def has_traits(self) -> bool:
        """Whether the nodes were read from Kubernetes, so that the constraints of a pod can be applied."""
        return any(node.traits is not None for node in self.nodes)


def record_of(state: NodeState, reservations: ReservationsChanged | None = None, *, silent: bool = False) -> NodeRecord:
    """The record of a node. `reservations`: the newest message, just received; `silent`: as of `NodeRecord`."""
    known = NodeReservations()
    if reservations is not None:
        known = known.apply(reservations, 1, 0.0).observe(state)
    return NodeRecord(
        node=state.node,
        topology=state.topology,
        health=state.health,
        usage=state.usage,
        allocations=snapshot_of(state) if state.epoch else None,
        reserved=known.held(0.0),
        silent=silent,
    )


def snapshot_of(state: NodeState) -> AllocationsSnapshot:
    """The live allocations of a node as one fact."""
    return AllocationsSnapshot(
        node=state.node,
        epoch=state.epoch,
        seq=state.seq,
        allocations=tuple(state.allocations.values()),
        memory=dict(state.memory),
        digest=state.digest,
    )


def state_of(record: NodeRecord) -> NodeState:
    """The fold of a record's facts."""
    state = NodeState(node=record.node, topology=record.topology, health=record.health, usage=record.usage)
    return state if record.allocations is None else state.apply(record.allocations)
