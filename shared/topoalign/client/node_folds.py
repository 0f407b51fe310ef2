"""
Distinguishes new facts, repetitions and gaps for each node, with the same `NodeState` that the node itself uses.

A snapshot of a later epoch, or one that is next in the sequence, is accepted at once, so that a restarted node is
visible at once. One that is next in the sequence can be checked: its digest must equal that of the state before it. If
the digests differ, the writer or the reader has a defect.

A new fact of an older epoch comes from a second allocator with the same node name, or is forged. The node then has a
duplicate agent until its allocator has confirmed the view of it `STEADY` times in a row.

A client with the permission to publish can forge facts. So the view is compared with the facts that the node's
allocator confirms (`verifying`). If they differ, the node is unconfirmed. Then only a snapshot of the epoch that its
allocator confirms, at the confirmed seq or a later one, is accepted, even if higher numbers were received before. Two
different facts with the same epoch and seq are also such a difference, because one of them is forged.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
import structlog

from topoalign.core.model.errors import Contradiction, SequenceGap
from topoalign.core.model.events import AllocationsSnapshot, Event, LedgerFact
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState

REMEDY = "see who may publish on the node's subjects: only its own services should"

STEADY = 2
"""A duplicate agent counts as gone after this number of confirmations in a row, without a fact of it in between."""

log = structlog.get_logger("topoalign.client")


@dataclass
class Counts:
    """Counters of the messages of a client."""

    undecodable: int = 0
    """Messages that could not be decoded; they are on the dead-letter stream."""
    unknown: int = 0
    """Events of a later version, which were skipped."""
    repeated: int = 0
    """Events that had been received before and were dropped."""
    gaps: int = 0
    """Times that events of a node were missing and a snapshot was requested."""
    divergent: int = 0
    """Snapshots that disagreed with earlier facts of their writer. The snapshot is used."""
    duplicate_agents: int = 0
    """New facts of an older epoch that came after a newer epoch: two allocators use the name of one node."""
    differences: Counter[str] = field(default_factory=Counter)
    """Times that the writer did not confirm the view of a node, by `allocations`, `topology`, `health`, `usage`."""


Place = tuple[int, int]
"""Epoch and seq."""


@dataclass(slots=True)
class Believed:
    """The view of one node's allocations, and its known problems."""

    state: NodeState
    newest: LedgerFact | None = None
    """The event that was folded last."""
    logged: bool = False
    """Whether a difference was logged since the allocator last confirmed the view."""
    behind: Place | None = None
    """Epoch and seq of the view when the allocator was last asked and was ahead of it."""
    asked: float | None = None
    """
    When a snapshot was last requested, in monotonic seconds; None: request one now. This and the following fields
    except `former` are for a broken node.
    """
    answered: int = 0
    """The number of snapshots that the allocator has promised since the last gap was found."""
    promised: int | None = None
    """The epoch of the snapshot that the allocator promised last."""
    silent: int = 0
    """The number of requests without an answer since the allocator's last answer."""
    skipped: Place | None = None
    """The highest epoch and seq of an event that could not be folded."""
    unconfirmed: bool = False
    """Whether a false fact was accepted."""
    confirmed: Place | None = None
    """Epoch and seq that the allocator of an unconfirmed node confirms; None: still unknown."""
    former: Place = (0, 0)
    """Epoch and seq of the last fact that was received of the previous epoch."""


class Fold:
    """Folds the allocations of all nodes, and distinguishes new facts from repetitions and gaps."""

    def __init__(self, counts: Counts) -> None:
        self.broken: dict[NodeName, Believed] = {}
        """The nodes with missing events."""
        self.anew = False
        """Whether the last new fact replaces the earlier ones and does not follow them."""
        self.duplicate_agents: dict[NodeName, int] = {}
        """Node for which two allocators publish -> confirmations that are needed until the other one counts as gone."""
        self.behind: set[NodeName] = set()
        """The nodes whose allocators had published more than was received when they were last asked."""
        self._counts = counts
        self._nodes: dict[NodeName, Believed] = {}

    def of(self, node: NodeName) -> Believed:
        """The view of this node. If nothing was received of it, an empty view is created."""
        if node not in self._nodes:
            self._nodes[node] = Believed(NodeState(node=node))
        return self._nodes[node]

    def __contains__(self, node: NodeName) -> bool:
        return node in self._nodes

    def forget(self, node: NodeName) -> None:
        """Drops everything that is kept of this node."""
        for kept in (self._nodes, self.broken, self.duplicate_agents):
            kept.pop(node, None)
        self.behind.discard(node)

    def apply(self, event: Event) -> bool:
        """Applies a fact if it is new, and returns whether it was. Raises Contradiction if the fact cannot be true."""
        if not isinstance(event, LedgerFact):
            return False
        believed = self.of(event.node)
        self.anew = False
        had = believed.state
        if believed.former < (event.epoch, event.seq) and event.epoch < had.epoch:
            self._find_duplicate(event, had)
        if believed.unconfirmed:
            return self._confirm_by_snapshot(believed, event)
        if event.epoch == had.epoch and event.seq <= had.seq:
            self._check_repetition(believed, event)
            return False
        if event.epoch < had.epoch and event.epoch != believed.promised:
            # A former epoch comes again if a stream went back. It is accepted if the allocator confirms it as its own.
            if event.node not in self.broken:
                self._break(believed)
            return False
        if event.node not in self.broken:
            self._compare(had, event)
        elif not isinstance(event, AllocationsSnapshot):
            skip(believed, event)
            return False
        self.anew = event.epoch < had.epoch
        try:
            self._move(believed, event, had.apply(event))
        except SequenceGap:
            self._counts.gaps += 1
            self._break(believed)
            skip(believed, event)
            return False
        except Contradiction:
            self._break(believed)
            raise
        return True

    def _confirm_by_snapshot(self, believed: Believed, event: LedgerFact) -> bool:
        """Applies a snapshot that its allocator confirms; until the allocator has answered, any later snapshot."""
        had = believed.state
        confirmed = believed.confirmed
        place = (event.epoch, event.seq)
        if confirmed is not None and event.epoch != confirmed[0]:
            return False
        is_later = place > (had.epoch, had.seq)
        ends = is_later if confirmed is None else place >= confirmed
        if not isinstance(event, AllocationsSnapshot) or not ends:
            skip(believed, event)
            return False
        self.anew = not is_later
        self._move(believed, event, NodeState(node=event.node).apply(event))
        return True

    def _break(self, believed: Believed) -> None:
        """Notes that events of the node are missing, so that a snapshot is requested."""
        believed.asked = None
        self.broken.pop(believed.state.node, None)
        self.broken[believed.state.node] = believed  # at the end, after all that were asked

    def _move(self, believed: Believed, event: LedgerFact, state: NodeState) -> None:
        """Replaces the view of a node by the state after this event, which ends a gap."""
        had = believed.state
        former = (had.epoch, had.seq) if event.epoch > had.epoch else believed.former
        whole = self._nodes[event.node] = Believed(state, event, logged=believed.logged, former=former)
        self.broken.pop(event.node, None)
        self.behind.discard(event.node)
        if believed.skipped is not None and believed.skipped > (event.epoch, event.seq):
            self._break(whole)  # messages came out of order: the next snapshot contains the skipped ones

    def _check_repetition(self, believed: Believed, event: LedgerFact) -> None:
        """Counts a fact with a known number as a repetition if it is equal; otherwise makes the node unconfirmed."""
        newest = believed.newest
        if newest is None or (event.epoch, event.seq) != (newest.epoch, newest.seq) or event == newest:
            self._counts.repeated += 1
            return
        self.count_difference(event.node, "two facts have the same number")
        self.mark_unconfirmed(event.node, None)

    def count_difference(self, node: NodeName, finding: str) -> None:
        """Counts that a false fact was accepted, and logs it once until the allocator confirms the view again."""
        self._counts.differences["allocations"] += 1
        believed = self.of(node)
        if not believed.logged:
            believed.logged = True
            log.warning(
                "an allocator does not confirm what was received of its node: a snapshot is requested",
                node=node,
                finding=finding,
                remedy=REMEDY,
            )

    def count_agreement(self, node: NodeName) -> None:
        """Notes that the node's allocator has confirmed the view of it."""
        believed = self.of(node)
        believed.behind = None
        believed.logged = False
        self.behind.discard(node)
        remaining = self.duplicate_agents.pop(node, 0) - 1
        if remaining > 0:
            self.duplicate_agents[node] = remaining

    def _find_duplicate(self, event: LedgerFact, had: NodeState) -> None:
        """Notes that two allocators publish for a node, and logs it once until one of them counts as gone."""
        self._counts.duplicate_agents += 1
        if event.node not in self.duplicate_agents:
            log.error(
                "two allocators publish for one node: a fact of an older epoch came after a newer one",
                node=event.node,
                epochs=sorted((event.epoch, had.epoch)),
                remedy="see that no other machine runs an agent under this node's name",
            )
        self.duplicate_agents[event.node] = STEADY

    def mark_unconfirmed(self, node: NodeName, confirmed: Place | None) -> None:
        """Notes that a false fact was accepted. `confirmed`: epoch and seq that the allocator confirms, if known."""
        believed = self.of(node)
        believed.unconfirmed = True
        believed.confirmed = confirmed
        believed.skipped = None
        self._break(believed)

    def is_unconfirmed(self, node: NodeName) -> bool:
        """Whether a false fact of the node was accepted, so that only a confirmed snapshot is accepted now."""
        return node in self._nodes and self._nodes[node].unconfirmed

    def promise(self, node: NodeName, epoch: int, seq: int) -> None:
        """Notes that the node's allocator will publish a snapshot with this epoch and seq."""
        believed = self.of(node)
        believed.promised = epoch
        if believed.unconfirmed and (believed.confirmed is None or believed.confirmed[0] != epoch):
            believed.confirmed = epoch, seq

    def view(self, node: NodeName) -> Believed:
        """The current view of this node, empty if nothing was received. Its `state` and `newest` do not change."""
        return self._nodes.get(node) or Believed(NodeState(node=node))

    def _compare(self, had: NodeState, event: LedgerFact) -> None:
        """Compares the digest of a snapshot that is next in the sequence with that of the state before it."""
        if not isinstance(event, AllocationsSnapshot) or (event.epoch, event.seq) != (had.epoch, had.seq + 1):
            return
        if event.digest != had.digest:
            self._counts.divergent += 1
            log.warning(
                "snapshot differs from the facts before it",
                node=event.node,
                seq=event.seq,
                had=had.digest,
                got=event.digest,
            )

    def snapshots(self) -> list[AllocationsSnapshot]:
        """The allocations of every node without missing events, as snapshot events."""
        return [
            AllocationsSnapshot(
                node=node,
                epoch=state.epoch,
                seq=state.seq,
                allocations=tuple(state.allocations.values()),
                memory=dict(state.memory),
                digest=state.digest,
            )
            for node, state in ((node, self._nodes[node].state) for node in sorted(self._nodes))
            if self._nodes[node].newest is not None and node not in self.broken
        ]


def skip(believed: Believed, event: LedgerFact) -> None:
    """Notes the place of an event that could not be folded; a snapshot that comes after it contains it."""
    place = event.epoch, event.seq
    believed.skipped = place if believed.skipped is None else max(believed.skipped, place)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its position, as a subscriber receives it."""

    event: Event
    position: int
    """Position in the stream. `since=position` continues after it. An initial snapshot covers all events up to it."""
    time: float | None
    """When it became true, in wall seconds, as its writer reports; None: the writer reports no time."""
    body: bytes = b""
    """
    The event in JSON as its writer published it, including fields that only a later version knows. An initial snapshot
    is encoded by this version. Empty if the client was created without `bodies`.
    """
    state: NodeState | None = None
    """The node's allocations after this event, without other data of the node; None for topology, health and usage."""
    anew: bool = False
    """
    True if this event is a snapshot that replaces the node's allocations, epoch and seq, even by a lower epoch or seq.
    It is an initial snapshot, or the node's allocator did not confirm what was received before.
    """


def current_snapshot(snapshot: AllocationsSnapshot, state: NodeState, position: int, time: float) -> Delivery:
    """Builds the delivery of an initial snapshot, which nobody has published: a node's allocations at this position."""
    body = msgspec.json.encode(snapshot)
    return Delivery(event=snapshot, position=position, time=time, body=body, state=state, anew=True)


def time_of(message: Message) -> float | None:
    """When the event became true, in wall seconds; None without a valid header `ce-time`."""
    try:
        return datetime.fromisoformat(message.headers.get("ce-time", "")).timestamp()
    except ValueError:
        return None
