"""
All nodes as their facts have them, folded one fact at a time.

The fold is `NodeState.apply`, the same as in the allocators; beside it stands what only an onlooker needs: since when an
allocation is held, when a node last said something, and whether its allocator answers. A node whose allocator is away is
stale: what is shown of it was true, but nobody vouches for it now.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from topoalign.core.errors import NotFound
from topoalign.core.events import AllocationGranted, DeviceHealthChanged, Event, TopologyDiscovered
from topoalign.core.ids import AllocationID, NodeName
from topoalign.core.state import NodeState


@dataclass
class Member:
    """One node of the cluster."""

    state: NodeState
    since: dict[AllocationID, str] = field(default_factory=dict)
    """RFC 3339 time at which a live allocation was granted, where its grant was heard."""
    last_event: str = ""
    """RFC 3339 time of the newest fact. Empty: none carried a time."""
    answering: bool = False
    """Whether the node's allocator answered when last asked, or has spoken since."""


class Cluster:
    """The nodes by name."""

    def __init__(self) -> None:
        self._members: dict[NodeName, Member] = {}

    def apply(self, event: Event, time: str) -> None:
        """Folds a fact that became true at `time` (RFC 3339). Raises SequenceGap where facts are missing."""
        member = self._members.get(event.node) or Member(NodeState(node=event.node))
        member.state = member.state.apply(event)
        self._members[event.node] = member
        member.last_event = max(member.last_event, time)
        if isinstance(event, TopologyDiscovered | DeviceHealthChanged):
            return
        if isinstance(event, AllocationGranted):
            member.since.setdefault(event.allocation.id, time)
        if len(member.since) > len(member.state.allocations):
            member.since = {name: at for name, at in member.since.items() if name in member.state.allocations}

    def answers(self, node: NodeName, answering: bool) -> None:
        """Notes whether the node's allocator is there."""
        if node in self._members:
            self._members[node].answering = answering

    def member(self, node: NodeName) -> Member:
        """Raises NotFound."""
        try:
            return self._members[node]
        except KeyError:
            raise NotFound("node", node, "GET /v1/nodes lists the nodes that have announced themselves") from None

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """Names of all nodes, sorted."""
        return tuple(sorted(self._members))

    def __iter__(self) -> Iterator[Member]:
        """The nodes in the order of their names."""
        return (self._members[name] for name in self.nodes)
