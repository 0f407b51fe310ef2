"""
Recognises news, repetitions and gaps, per node, with the same `NodeState` that the node itself uses.

A snapshot of a later epoch, or one that comes next in the sequence, is believed at once, because a restarted node must
be shown at once. One that comes next in the sequence can be checked: its digest is that of the state before it, and if
the digests differ, a writer or a reader has a defect.

A fact of an older epoch that nobody has received yet comes from a second allocator under the node's name, or is forged. The
node then has a duplicate agent, until its allocator has confirmed the view of it `STEADY` times in a row.

A client with the permission to publish can forge a fact. So the view is compared with the facts that the node's
allocator confirms (`verifying`). If they differ, the node is unconfirmed: only a snapshot of the epoch that its allocator
confirms, at the confirmed seq or a later one, is believed, whatever numbers were received before. Two different facts
with the same number are such a difference, too: one of them is forged.
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
"""Confirmations in a row, without a fact of another allocator in between, after which a duplicate agent counts as gone."""

log = structlog.get_logger("topoalign.client")


@dataclass
class Counts:
    """Counters of what a client has received so far."""

    undecodable: int = 0
    """Messages that could not be decoded; they are on the dead-letter stream."""
    unknown: int = 0
    """Events of a later version, skipped."""
    repeated: int = 0
    """Events that were received before, dropped."""
    gaps: int = 0
    """Times that events of a node were missing and a snapshot was asked for."""
    divergent: int = 0
    """Snapshots that disagreed with the facts that their writer had published before; the snapshot counts."""
    duplicate_agents: int = 0
    """Facts of an older epoch that came after a newer one and were new: two allocators use one node's name."""
    differences: Counter[str] = field(default_factory=Counter)
    """Times that the view of a node was not what its writer confirms: `allocations`, `topology`, `health`, `usage`."""


Place = tuple[int, int]
"""Epoch and seq."""


@dataclass(slots=True)
class Believed:
    """The view of one node's allocations, and what is known to be wrong with it."""

    state: NodeState
    newest: LedgerFact | None = None
    """The event that was folded last."""
    logged: bool = False
    """Whether a difference was logged since the allocator last confirmed the view."""
    behind: Place | None = None
    """Epoch and seq of the view when the allocator was last asked and was ahead of it."""
    asked: float | None = None
    """When the allocator was last asked for a snapshot; None: ask now. This and all fields below are for a broken node."""
    answered: int = 0
    """How many snapshots the allocator has promised since the last gap was found."""
    promised: int | None = None
    """The epoch that the allocator named when it was asked for a snapshot last."""
    silent: int = 0
    """How many requests the allocator has left unanswered since its last answer."""
    skipped: Place | None = None
    """The highest epoch and seq of an event that could not be folded."""
    unconfirmed: bool = False
    """Whether a false fact was believed."""
    confirmed: Place | None = None
    """Epoch and seq that the allocator of an unconfirmed node confirms, once known."""
    former: Place = (0, 0)
    """The last epoch and seq that were received of the epoch before this one."""


class Fold:
    """Folds the allocations of all nodes, and distinguishes news from repetitions and gaps."""

    def __init__(self, counts: Counts) -> None:
        self.broken: dict[NodeName, Believed] = {}
        """The nodes with missing events."""
        self.anew = False
        """Whether the newest news replaces what was received before, and does not follow it."""
        self.duplicate_agents: dict[NodeName, int] = {}
        """Node for which two allocators publish -> confirmations until the other one counts as gone."""
        self.behind: set[NodeName] = set()
        """The nodes whose allocators had published more than was received when they were last asked."""
        self._counts = counts
        self._nodes: dict[NodeName, Believed] = {}

    def of(self, node: NodeName) -> Believed:
        """The view of this node; an empty one is created where nothing was received of it."""
        if node not in self._nodes:
            self._nodes[node] = Believed(NodeState(node=node))
        return self._nodes[node]

    def __contains__(self, node: NodeName) -> bool:
        return node in self._nodes

    def forget(self, node: NodeName) -> None:
        """Keeps nothing of this node."""
        for kept in (self._nodes, self.broken, self.duplicate_agents):
            kept.pop(node, None)
        self.behind.discard(node)

    def apply(self, event: Event) -> bool:
        """Whether this is news. Raises Contradiction for a fact that cannot be true, after which a snapshot is due."""
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
            # A former epoch comes again where a stream went back. It is believed if the allocator confirms it as its own.
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
        """Folds a snapshot that confirms an unconfirmed node; any later one until the allocator has answered."""
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
        """Events of the node are missing: its allocator is to be asked."""
        believed.asked = None
        self.broken.pop(believed.state.node, None)
        self.broken[believed.state.node] = believed  # behind all that were asked

    def _move(self, believed: Believed, event: LedgerFact, state: NodeState) -> None:
        """Replaces the view of a node by the state after this event, without missing events."""
        had = believed.state
        former = (had.epoch, had.seq) if event.epoch > had.epoch else believed.former
        whole = self._nodes[event.node] = Believed(state, event, logged=believed.logged, former=former)
        self.broken.pop(event.node, None)
        self.behind.discard(event.node)
        if believed.skipped is not None and believed.skipped > (event.epoch, event.seq):
            self._break(whole)  # messages overtook one another: the next snapshot has what was skipped

    def _check_repetition(self, believed: Believed, event: LedgerFact) -> None:
        """Counts a fact with a known number as a repetition if its content is equal; else the node becomes unconfirmed."""
        newest = believed.newest
        if newest is None or (event.epoch, event.seq) != (newest.epoch, newest.seq) or event == newest:
            self._counts.repeated += 1
            return
        self.count_difference(event.node, "two facts have the same number")
        self.mark_unconfirmed(event.node, None)

    def count_difference(self, node: NodeName, finding: str) -> None:
        """Counts that a false fact was believed, and logs it once until the allocator confirms the view again."""
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
        """A false fact of the node was believed. `confirmed`: epoch and seq that its allocator confirms, if known."""
        believed = self.of(node)
        believed.unconfirmed = True
        believed.confirmed = confirmed
        believed.skipped = None
        self._break(believed)

    def is_unconfirmed(self, node: NodeName) -> bool:
        """Whether only the snapshot that confirms the node would be believed."""
        return node in self._nodes and self._nodes[node].unconfirmed

    def promise(self, node: NodeName, epoch: int, seq: int) -> None:
        """Notes that the node's allocator will publish a snapshot with this epoch and seq."""
        believed = self.of(node)
        believed.promised = epoch
        if believed.unconfirmed and (believed.confirmed is None or believed.confirmed[0] != epoch):
            believed.confirmed = epoch, seq

    def view(self, node: NodeName) -> Believed:
        """The view of this node now: its `state` and `newest` do not change. An empty one where nothing was received."""
        return self._nodes.get(node) or Believed(NodeState(node=node))

    def _compare(self, had: NodeState, event: LedgerFact) -> None:
        """Compares a snapshot with the state before it: one that comes next in the sequence must have the same digest."""
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
    """
    Position in the stream, to continue after: `since=position`. A snapshot at the start has the position it stands for.
    """
    time: float | None
    """Wall seconds at which it became true, as its writer reports; None without a report."""
    body: bytes = b""
    """
    The event in JSON as its writer published it, with fields that only a later version knows. A snapshot at the start is in
    this version's JSON. Empty if the client was created without `bodies`.
    """
    state: NodeState | None = None
    """The node's allocations after this event, and nothing else of the node; None for hardware and usage."""
    anew: bool = False
    """
    True if this event is a snapshot that replaces what was received of the node's allocations, its epoch and seq, also where
    its epoch or seq is not greater. This happens where the node's allocator does not confirm what was received before.
    """


def current_snapshot(snapshot: AllocationsSnapshot, state: NodeState, position: int, time: float) -> Delivery:
    """Makes the delivery of a snapshot that nobody has published: the allocations of a node at this position."""
    body = msgspec.json.encode(snapshot)
    return Delivery(event=snapshot, position=position, time=time, body=body, state=state, anew=True)


def time_of(message: Message) -> float | None:
    """When the event became true, in wall seconds; None without a valid header `ce-time`."""
    try:
        return datetime.fromisoformat(message.headers.get("ce-time", "")).timestamp()
    except ValueError:
        return None
