"""
Telling news from repetitions and gaps, per node, by the same `NodeState` that the node itself uses.

A snapshot is always believed, since it comes from the allocator that knows. Where it comes next in the sequence it can be
checked all the same: its digest is that of the state before it, and if ours differs, a writer or a reader has a defect.
"""

from dataclasses import dataclass

import structlog

from topoalign.core.errors import Contradiction, SequenceGap
from topoalign.core.events import AllocationsSnapshot, Event, LedgerFact
from topoalign.core.ids import NodeName
from topoalign.core.state import NodeState

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
        self._counts = counts
        self._states: dict[NodeName, NodeState] = {}

    def apply(self, event: Event) -> bool:
        """Whether this is news. Raises Contradiction for a fact that cannot be true, after which a snapshot is due."""
        if not isinstance(event, LedgerFact):
            return False
        had = self._states.get(event.node, NodeState(node=event.node))
        if event.epoch == had.epoch and event.seq <= had.seq:
            self._counts.repeated += 1
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
        try:
            self._states[event.node] = had.apply(event)
        except SequenceGap:
            self._counts.gaps += 1
            self.broken[event.node] = None
            self._skip(event)
            return False
        except Contradiction:
            self.broken[event.node] = None
            raise
        self.broken.pop(event.node, None)
        self.answered.pop(event.node, None)
        self.promised.pop(event.node, None)
        self.silent.discard(event.node)
        if self._skipped.pop(event.node, (0, 0)) > (event.epoch, event.seq):
            self.broken[event.node] = None  # messages overtook one another: the next snapshot has what was skipped
        return True

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
