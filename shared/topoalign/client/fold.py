"""
Recognises news, repetitions and gaps, per node, with the same `NodeState` that the node itself uses.

A snapshot of a later epoch, or one that comes next in the sequence, is believed at once, because a restarted node must
be shown at once. One that comes next in the sequence can be checked: its digest is that of the state before it, and if
the digests differ, a writer or a reader has a defect.

A client with the permission to publish can forge a fact. So the view is compared with the facts that the node's
allocator confirms (`verifying`). If they differ, the node is in doubt: only a snapshot of the epoch that its allocator
confirms, at the confirmed seq or a later one, is believed, whatever numbers were received before. Two different facts
with the same number are such a difference, too: one of them is forged.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from topoalign.core.model.errors import Contradiction, SequenceGap
from topoalign.core.model.events import AllocationsSnapshot, Event, LedgerFact
from topoalign.core.model.ids import NodeName
from topoalign.core.state.fold import NodeState

REMEDY = "see who may publish on the node's subjects: only its own services should"

log = structlog.get_logger("topoalign.client")


@dataclass
class Counts:
    """What a client has met so far."""

    undecodable: int = 0
    """Messages that are not what they claim to be; they are on the dead-letter stream."""
    unknown: int = 0
    """Events of a later version, skipped."""
    repeated: int = 0
    """Events that were heard before, dropped."""
    gaps: int = 0
    """Times that events of a node were missing and a snapshot was asked for."""
    divergent: int = 0
    """Snapshots that disagreed with what their writer had said before; what they say counts."""
    differences: Counter[str] = field(default_factory=Counter)
    """
    Times that what was believed of a node was not what its writer stands by: `allocations`, `topology`, `health`, `usage`.
    """


class View(NamedTuple):
    """What is believed of a node's allocations."""

    epoch: int
    seq: int
    digest: str
    claimed: str | None
    """The digest that the last event claims, if that is a snapshot."""


class Fold:
    """What has been heard of the allocations of all nodes, for telling news from repetitions and gaps."""

    def __init__(self, counts: Counts) -> None:
        self.broken: dict[NodeName, float | None] = {}
        """Nodes with missing events -> when their allocator was last asked for a snapshot."""
        self.answered: dict[NodeName, int] = {}
        """Of these nodes: how many snapshots their allocator has promised since they were whole."""
        self.promised: dict[NodeName, int] = {}
        """Of these nodes: the epoch that their allocator named when it was asked for a snapshot last."""
        self.silent: set[NodeName] = set()
        """Of these nodes: those whose allocator was asked in vain, as it was said in the log."""
        self._skipped: dict[NodeName, tuple[int, int]] = {}
        """Of these nodes: epoch and seq of the last event that could not be folded."""
        self.behind: dict[NodeName, tuple[int, int]] = {}
        """Nodes that were behind their allocator when it was asked last -> epoch and seq that they had."""
        self.anew = False
        """Whether the newest news replaces what was heard before, and does not follow it."""
        self._doubted: dict[NodeName, tuple[int, int] | None] = {}
        """Of the broken nodes those of which a false fact was believed -> what their allocator stands by, once known."""
        self._newest: dict[NodeName, LedgerFact] = {}
        """The event that was folded last."""
        self._told: set[NodeName] = set()
        """Nodes of which it was logged that a false fact was believed, since their allocator agreed last."""
        self._counts = counts
        self._states: dict[NodeName, NodeState] = {}

    def apply(self, event: Event) -> bool:
        """Whether this is news. Raises Contradiction for a fact that cannot be true, after which a snapshot is due."""
        if not isinstance(event, LedgerFact):
            return False
        had = self._states.get(event.node, NodeState(node=event.node))
        self.anew = False
        if event.node in self._doubted:
            return self._settle_doubt(event)
        if event.epoch == had.epoch and event.seq <= had.seq:
            self._look_twice(event)
            return False
        if event.epoch < had.epoch and event.epoch != self.promised.get(event.node):
            # An epoch that is over comes again where a stream went back. It is believed if the allocator says it is its own.
            self.broken.setdefault(event.node, None)
            return False
        if event.node not in self.broken:
            self._compare(had, event)
        elif not isinstance(event, AllocationsSnapshot):
            self._skip(event)
            return False
        self.anew = event.epoch < had.epoch
        try:
            self._move(event, had.apply(event))
        except SequenceGap:
            self._counts.gaps += 1
            self.broken[event.node] = None
            self._skip(event)
            return False
        except Contradiction:
            self.broken[event.node] = None
            raise
        return True

    def _settle_doubt(self, event: LedgerFact) -> bool:
        """
        Whether this is the snapshot that ends the doubt. As long as the allocator has not been reached, any later one does,
        as where nothing was forged.
        """
        had = self._states.get(event.node, NodeState(node=event.node))
        confirmed, place = self._doubted[event.node], (event.epoch, event.seq)
        if confirmed is not None and event.epoch != confirmed[0]:
            return False
        is_later = place > (had.epoch, had.seq)
        believed = is_later if confirmed is None else place >= confirmed
        if not isinstance(event, AllocationsSnapshot) or not believed:
            self._skip(event)
            return False
        self.anew = not is_later
        self._move(event, NodeState(node=event.node).apply(event))
        return True

    def _move(self, event: LedgerFact, state: NodeState) -> None:
        """The node is whole, up to this event."""
        self._states[event.node], self._newest[event.node] = state, event
        self._doubted.pop(event.node, None)
        self.behind.pop(event.node, None)
        self.broken.pop(event.node, None)
        self.answered.pop(event.node, None)
        self.promised.pop(event.node, None)
        self.silent.discard(event.node)
        if self._skipped.pop(event.node, (0, 0)) > (event.epoch, event.seq):
            self.broken[event.node] = None  # messages overtook one another: the next snapshot has what was skipped

    def _look_twice(self, event: LedgerFact) -> None:
        """A fact whose number was heard already is a repetition, if it says the same."""
        newest = self._newest.get(event.node)
        if newest is None or (event.epoch, event.seq) != (newest.epoch, newest.seq) or event == newest:
            self._counts.repeated += 1
            return
        self.differ(event.node, "two facts have the same number")
        self.doubt(event.node, None)

    def differ(self, node: NodeName, finding: str) -> None:
        """Counts that a false fact was believed, and logs it once until what is believed agrees again."""
        self._counts.differences["allocations"] += 1
        if node not in self._told:
            self._told.add(node)
            log.warning(
                "an allocator does not stand by what was heard of its node: a snapshot is asked for",
                node=node,
                finding=finding,
                remedy=REMEDY,
            )

    def agree(self, node: NodeName) -> None:
        """The node's allocator stands by what is believed of it."""
        self.behind.pop(node, None)
        self._told.discard(node)

    def doubt(self, node: NodeName, confirmed: tuple[int, int] | None) -> None:
        """A false fact was believed of this node. `confirmed`: epoch and seq that its allocator stands by, if known."""
        self.broken[node] = None
        self._doubted[node] = confirmed
        self._skipped.pop(node, None)

    def is_in_doubt(self, node: NodeName) -> bool:
        """Whether nothing is believed of the node but the snapshot that ends its doubt."""
        return node in self._doubted

    def promise(self, node: NodeName, epoch: int, seq: int) -> None:
        """The node's allocator has announced a snapshot of this place."""
        self.promised[node] = epoch
        if node in self._doubted:
            confirmed = self._doubted[node]
            if confirmed is None or confirmed[0] != epoch:
                self._doubted[node] = epoch, seq

    def view(self, node: NodeName) -> View:
        """What is believed of this node now; all zero where nothing was heard."""
        state = self._states.get(node, NodeState(node=node))
        newest = self._newest.get(node)
        claimed = newest.digest if isinstance(newest, AllocationsSnapshot) else None
        return View(state.epoch, state.seq, state.digest, claimed)

    def _skip(self, event: LedgerFact) -> None:
        """What cannot be folded is in a snapshot that comes after it."""
        place = event.epoch, event.seq
        self._skipped[event.node] = max(self._skipped.get(event.node, place), place)

    def _compare(self, had: NodeState, event: LedgerFact) -> None:
        """A snapshot that comes next after what was heard says the same in other words; else one of the two is wrong."""
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
        """The allocations of every node that is known whole, as events."""
        return [
            AllocationsSnapshot(
                node=node,
                epoch=state.epoch,
                seq=state.seq,
                allocations=tuple(state.allocations.values()),
                memory=dict(state.memory),
                digest=state.digest,
            )
            for node, state in sorted(self._states.items())
            if node not in self.broken
        ]
