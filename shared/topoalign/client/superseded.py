"""
Finds the facts of a stream for which a later snapshot of their node stands, so that a reader of a long stream skips them.

The rule: the snapshots of the stream are folded alone, by the rules for all facts (`Fold`). The last one of a node that
is believed is its newest, and the facts that were stored before it are superseded. They are not decoded; but the epoch and
seq that their headers name are compared with those of the snapshot. If they are not lower, it was not the newest: an old
snapshot was stored again, or one was forged. Then everything of this node is read, as if nothing were superseded.

A stream may lose its end while it is read, or become another one. Where the snapshot that was to stand for what was passed
over does not come, the whole stream is read again, and nothing of it is passed over.

    stored of one node: snapshot 1, granted 2, snapshot 3, granted 4     read: snapshot 3, granted 4
    stored of one node: snapshot 1, granted 2, granted 3, forged snapshot 2     read: all of it
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import anyio
import structlog

from topoalign.client.node_folds import Counts, Fold
from topoalign.core import wire
from topoalign.core.model.errors import Undecodable
from topoalign.core.model.events import LARGEST_NUMBER, AllocationsSnapshot, LedgerFact
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Message, Received
from topoalign.runtime.request_turns import TaskTurns

Place = tuple[int, int]
"""Epoch and seq."""


class Superseded:
    """Recognises superseded facts while one stream is read in order."""

    def __init__(self, newest: Mapping[NodeName, int]) -> None:
        """`newest`: node -> the position of its newest snapshot."""
        self._newest = {wire.encode_node_token(node): position for node, position in newest.items()}
        self._highest: dict[str, Place] = {}
        """Subject token of a node -> the highest place of its superseded facts so far."""

    def has(self, received: Received) -> bool:
        """Whether this fact is superseded."""
        if not self._newest:
            return False
        token = received.message.subject.split(".", 4)[3]  # of allocation_subjects
        if received.position >= self._newest.get(token, 0):
            return False
        place = message_position(received.message)
        if place > self._highest.get(token, (-1, -1)):
            self._highest[token] = place
        return True

    @property
    def missed(self) -> bool:
        """Whether something was passed over for which no snapshot has come yet."""
        return bool(self._highest)

    def is_newest(self, fact: LedgerFact) -> bool:
        """
        Whether this fact, which is not superseded, comes after those of its node that are. Then they are missed no more if
        it is a snapshot; if it does not come after them, the caller reads them.
        """
        token = wire.encode_node_token(fact.node)
        self._newest.pop(token, None)
        highest = self._highest.get(token, (-1, -1))
        follows = highest < (fact.epoch, fact.seq)
        if not follows or isinstance(fact, AllocationsSnapshot):
            self._highest.pop(token, None)
        return follows

    def clear(self) -> None:
        """Nothing more is superseded: the stream is another one."""
        self._newest.clear()


def message_position(message: Message) -> Place:
    """Epoch and seq from the id of a fact, without decoding it; the highest possible where the id does not contain them."""
    try:
        parts = message.headers["Nats-Msg-Id"].split(".", 4)
        return int(parts[2]), int(parts[3])
    except (LookupError, ValueError):
        return LARGEST_NUMBER, LARGEST_NUMBER


async def newest_snapshots(
    messages: AsyncIterator[Received], end: int, patience: float, turns: TaskTurns
) -> dict[NodeName, int]:
    """
    Node -> the position of its newest snapshot, of those up to the position `end`. Empty if the stream went back, or if a
    message does not come within so many seconds: then everything is to be read.
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
"""Four times the nodes of a large cluster, which are all unknown until they are asked. Each takes some kilobytes."""

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
        """Makes the node an unknown one."""
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
