"""
All nodes, folded from their facts one by one.

The fold is `NodeState.apply`, the same as in the allocators. In addition the cluster keeps for each node when an
allocation was granted, when the node last published, and whether its allocator answers. A node whose allocator does not
answer is stale: its view was true, but no service confirms it now.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from topoalign.client import Heard
from topoalign.core.model.errors import NotFound
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.state.fold import NodeState


@dataclass
class Member:
    """One node of the cluster. Times are wall seconds, as the node says them."""

    state: NodeState
    since: dict[AllocationID, float] = field(default_factory=dict)
    """When a live allocation was granted, where its grant was heard."""
    last_event: float | None = None
    """When the newest fact became true. None: no fact carried a time."""
    answering: bool = False
    """Whether the node's allocator answered when last asked, or has spoken since."""

    def apply(self, heard: Heard) -> None:
        """Folds a fact that the client has let through: no repetition, and none missing before it."""
        if heard.anew:
            self.state = msgspec.structs.replace(self.state, epoch=0, seq=0, allocations={}, memory={})
            self.last_event = None  # a forged fact may be of any time
        self.state = self.state.apply(heard.event)
        if heard.time is None:
            return
        self.last_event = max(self.last_event or heard.time, heard.time)
        if isinstance(heard.event, AllocationGranted):
            self.since[heard.event.allocation.id] = heard.time
        if len(self.since) > len(self.state.allocations):
            self.since = {name: at for name, at in self.since.items() if name in self.state.allocations}


class Cluster:
    """The nodes by name."""

    def __init__(self) -> None:
        self._members: dict[NodeName, Member] = {}

    def apply(self, heard: Heard) -> None:
        """Fold an event into its node, which is added at its first event."""
        node = heard.event.node
        self._members.setdefault(node, Member(NodeState(node=node))).apply(heard)

    def answers(self, node: NodeName, answering: bool) -> None:
        """Notes whether the node's allocator is there."""
        self._members[node].answering = answering

    def forget(self, node: NodeName) -> None:
        """Shows this node no more, until it speaks again."""
        self._members.pop(node, None)

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

    def __contains__(self, node: NodeName) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[Member]:
        """The nodes in the order of their names."""
        return (self._members[name] for name in self.nodes)
