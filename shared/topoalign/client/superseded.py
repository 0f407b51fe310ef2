"""
Finds where reading of a long stream can begin: at the newest snapshot of each node.

First, only the snapshots of the stream are folded, by the same rules as all facts (`Fold`). The last accepted snapshot
of a node is its newest. The node's facts that were stored before it are superseded. Reading begins at the first newest
snapshot of any node, and superseded facts after it are not decoded. `verifying` checks a view that began at a snapshot,
by a request to the allocator.

    stored for one node: snapshot 1, granted 2, snapshot 3, granted 4     read: snapshot 3, granted 4
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import anyio
import structlog

from topoalign.client.node_folds import Counts, Fold
from topoalign.core import wire
from topoalign.core.model.errors import Undecodable
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Received
from topoalign.runtime.request_turns import TaskTurns


class Superseded:
    """Recognises superseded facts of one stream."""

    def __init__(self, newest: Mapping[NodeName, int]) -> None:
        """`newest`: node -> the position of its newest snapshot."""
        self._newest = {wire.encode_node_token(node): position for node, position in newest.items()}
        self.until = min(newest.values(), default=1) - 1
        """The position up to which all facts are superseded."""

    def has(self, received: Received) -> bool:
        """Whether this fact is superseded."""
        token = received.message.subject.split(".", 4)[3]  # as in allocation_subjects
        return received.position < self._newest.get(token, 0)


async def newest_snapshots(
    messages: AsyncIterator[Received], end: int, patience: float, turns: TaskTurns
) -> dict[NodeName, int]:
    """
    Node -> position of its newest snapshot up to the position `end`. Empty if the stream went back, or if no message
    comes within `patience` seconds. Then the whole stream must be read.
    """
    fold = Fold(Counts())
    newest = dict[NodeName, int]()
    position = 0
    kept = KeptNodes(fold.forget, lambda node: newest.pop(node, None))
    while position < end:
        received = None
        with anyio.move_on_after(patience):
            received = await anext(messages)
        if received is None or received.position <= position:
            return {}
        position = received.position
        await turns.give()
        with suppress(Undecodable, wire.UnknownEvent):  # the reader of the whole stream counts and reports it
            event = wire.decode_event(received.message)
            kept.note(event.node)
            if fold.apply(event):
                newest[event.node] = position
    return newest


MOST_UNKNOWN_NODES = 20_000
"""Four times the number of nodes of a large cluster, which are all unknown at the start. Each takes some kilobytes."""

log = structlog.get_logger("topoalign.client")


class KeptNodes:
    """
    Bounds the number of nodes whose facts are kept.

    A client that may publish on the subjects of nodes can invent names of nodes. A node is confirmed once a service of it
    has answered; until then it is unknown. At most `MOST_UNKNOWN_NODES` unknown nodes are kept: if there is one more, the
    node that has published nothing for the longest time is forgotten. Later facts of it are received as its first ones.
    """

    def __init__(self, *forgotten: Callable[[NodeName], object]) -> None:
        """`forgotten`: each is called with a node that is forgotten."""
        self.forgotten = [*forgotten]
        self.dropped = 0
        """Unknown nodes that were forgotten because there were too many."""
        self._confirmed: set[NodeName] = set()
        self._unknown: dict[NodeName, None] = {}
        """In the order of their last facts, the oldest first."""

    def note(self, node: NodeName) -> None:
        """Notes that something was received of this node."""
        if node in self._confirmed:
            return
        self._unknown.pop(node, None)
        self._unknown[node] = None
        while len(self._unknown) > MOST_UNKNOWN_NODES:
            self._drop(next(iter(self._unknown)))

    def confirm(self, node: NodeName) -> None:
        """Notes that a service of the node has answered."""
        self._unknown.pop(node, None)
        self._confirmed.add(node)

    def unconfirm(self, node: NodeName) -> None:
        """Makes the node unknown again."""
        self._confirmed.discard(node)
        self.note(node)

    def forget(self, node: NodeName) -> None:
        """Drops everything that is kept of this node."""
        self._unknown.pop(node, None)
        self._confirmed.discard(node)
        for each in self.forgotten:
            each(node)

    def _drop(self, node: NodeName) -> None:
        if not self.dropped:
            log.warning(
                "nodes that have never answered are forgotten: there are too many",
                most=MOST_UNKNOWN_NODES,
                node=node,
                remedy="see who may publish on the subjects of nodes: only their own services should",
            )
        self.dropped += 1
        self.forget(node)
