"""
Recognises news, repetitions and gaps, per node, with the same `NodeState` that the node itself uses.

A snapshot of a later epoch, or one that comes next in the sequence, is believed at once, because a restarted node must
be shown at once. One that comes next in the sequence can be checked: its digest is that of the state before it, and if
the digests differ, a writer or a reader has a defect.

A fact of an older epoch that nobody has received yet comes from a second allocator under the node's name, or is forged. The
node has a twin then, until its allocator has stood by what is believed of it `STEADY` times in a row.

A client with the permission to publish can forge a fact. So the view is compared with the facts that the node's
allocator confirms (`verifying`). If they differ, the node is in doubt: only a snapshot of the epoch that its allocator
confirms, at the confirmed seq or a later one, is believed, whatever numbers were received before. Two different facts
with the same number are such a difference, too: one of them is forged.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec
import structlog

from topoalign.core.model.errors import Contradiction, SequenceGap
from topoalign.core.model.events import AllocationsSnapshot, Event, LedgerFact, UsageObserved
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState

REMEDY = "see who may publish on the node's subjects: only its own services should"

STEADY = 2
"""So often the allocator of a node with a twin stands by what is believed, with no fact of another in between."""

log = structlog.get_logger("topoalign.client")


@dataclass
class Counts:
    """What a client has met so far."""

    undecodable: int = 0
    """Messages that are not what they claim to be; they are on the dead-letter stream."""
    unknown: int = 0
    """Events of a later version, skipped."""
    repeated: int = 0
    """Events that were received before, dropped."""
    gaps: int = 0
    """Times that events of a node were missing and a snapshot was asked for."""
    divergent: int = 0
    """Snapshots that disagreed with what their writer had said before; what they say counts."""
    twins: int = 0
    """Facts of an older epoch that came after a newer one and were new: two allocators use one node's name."""
    differences: Counter[str] = field(default_factory=Counter)
    """
    Times that what was believed of a node was not what its writer stands by: `allocations`, `topology`, `health`, `usage`.
    """


Place = tuple[int, int]
"""Epoch and seq."""


class View(NamedTuple):
    """What is believed of a node's allocations."""

    epoch: int
    seq: int
    digest: str
    claimed: str | None
    """The digest that the last event claims, if that is a snapshot."""


@dataclass(slots=True)
class Believed:
    """What is believed of the allocations of one node, and what is known to be wrong with it."""

    state: NodeState
    newest: LedgerFact | None = None
    """The event that was folded last."""
    told: bool = False
    """Whether it was logged that a false fact was believed, since the allocator agreed last."""
    behind: Place | None = None
    """Where this was when the allocator was asked last, and was ahead of it."""
    asked: float | None = None
    """When the allocator was asked for a snapshot last; None: it is to be asked now. For a broken node, as all below."""
    answered: int = 0
    """How many snapshots the allocator has promised since the node was whole."""
    promised: int | None = None
    """The epoch that the allocator named when it was asked for a snapshot last."""
    silent: int = 0
    """How often the allocator was asked in vain since it answered last."""
    skipped: Place | None = None
    """The highest epoch and seq of an event that could not be folded."""
    doubted: bool = False
    """Whether a false fact was believed."""
    confirmed: Place | None = None
    """Of a node in doubt: what its allocator stands by, once known."""
    former: Place = (0, 0)
    """The last place of the epoch before this one, as far as it was received."""


class Fold:
    """What has been known the allocations of all nodes, for telling news from repetitions and gaps."""

    def __init__(self, counts: Counts) -> None:
        self.broken: dict[NodeName, Believed] = {}
        """The nodes with missing events."""
        self.anew = False
        """Whether the newest news replaces what was received before, and does not follow it."""
        self.twins: dict[NodeName, int] = {}
        """The nodes for which two allocators speak -> how often one has to stand by what is believed until it is alone."""
        self.behind: set[NodeName] = set()
        """The nodes whose allocators have said more than was received, when they were asked last."""
        self._counts = counts
        self._nodes: dict[NodeName, Believed] = {}

    def of(self, node: NodeName) -> Believed:
        """What is believed of this node, where something was known it or asked about it; else nothing, which is kept."""
        if node not in self._nodes:
            self._nodes[node] = Believed(NodeState(node=node))
        return self._nodes[node]

    def __contains__(self, node: NodeName) -> bool:
        return node in self._nodes

    def forget(self, node: NodeName) -> None:
        """Keeps nothing of this node."""
        for kept in (self._nodes, self.broken, self.twins):
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
        if believed.doubted:
            return self._settle_doubt(believed, event)
        if event.epoch == had.epoch and event.seq <= had.seq:
            self._look_twice(believed, event)
            return False
        if event.epoch < had.epoch and event.epoch != believed.promised:
            # An epoch that is over comes again where a stream went back. It is believed if the allocator says it is its own.
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

    def _settle_doubt(self, believed: Believed, event: LedgerFact) -> bool:
        """
        Whether this is the snapshot that ends the doubt. As long as the allocator has not been reached, any later one does,
        as where nothing was forged.
        """
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
        """The node is whole, up to this event."""
        had = believed.state
        former = (had.epoch, had.seq) if event.epoch > had.epoch else believed.former
        whole = self._nodes[event.node] = Believed(state, event, told=believed.told, former=former)
        self.broken.pop(event.node, None)
        self.behind.discard(event.node)
        if believed.skipped is not None and believed.skipped > (event.epoch, event.seq):
            self._break(whole)  # messages overtook one another: the next snapshot has what was skipped

    def _look_twice(self, believed: Believed, event: LedgerFact) -> None:
        """A fact whose number was received already is a repetition, if it says the same."""
        newest = believed.newest
        if newest is None or (event.epoch, event.seq) != (newest.epoch, newest.seq) or event == newest:
            self._counts.repeated += 1
            return
        self.differ(event.node, "two facts have the same number")
        self.doubt(event.node, None)

    def differ(self, node: NodeName, finding: str) -> None:
        """Counts that a false fact was believed, and logs it once until what is believed agrees again."""
        self._counts.differences["allocations"] += 1
        believed = self.of(node)
        if not believed.told:
            believed.told = True
            log.warning(
                "an allocator does not stand by what was known its node: a snapshot is asked for",
                node=node,
                finding=finding,
                remedy=REMEDY,
            )

    def agree(self, node: NodeName) -> None:
        """The node's allocator stands by what is believed of it."""
        believed = self.of(node)
        believed.behind = None
        believed.told = False
        self.behind.discard(node)
        left = self.twins.pop(node, 0) - 1
        if left > 0:
            self.twins[node] = left

    def _find_duplicate(self, event: LedgerFact, had: NodeState) -> None:
        """Notes that two allocators speak for a node, and logs it once until one of them is alone."""
        self._counts.twins += 1
        if event.node not in self.twins:
            log.error(
                "two allocators speak for one node: a fact of an older epoch came after a newer one",
                node=event.node,
                epochs=sorted((event.epoch, had.epoch)),
                remedy="see that no other machine runs an agent under this node's name",
            )
        self.twins[event.node] = STEADY

    def doubt(self, node: NodeName, confirmed: Place | None) -> None:
        """A false fact was believed of this node. `confirmed`: epoch and seq that its allocator stands by, if known."""
        believed = self.of(node)
        believed.doubted = True
        believed.confirmed = confirmed
        believed.skipped = None
        self._break(believed)

    def is_in_doubt(self, node: NodeName) -> bool:
        """Whether nothing is believed of the node but the snapshot that ends its doubt."""
        return node in self._nodes and self._nodes[node].doubted

    def promise(self, node: NodeName, epoch: int, seq: int) -> None:
        """The node's allocator has announced a snapshot of this place."""
        believed = self.of(node)
        believed.promised = epoch
        if believed.doubted and (believed.confirmed is None or believed.confirmed[0] != epoch):
            believed.confirmed = epoch, seq

    def view(self, node: NodeName) -> View:
        """What is believed of this node now; all zero where nothing was received."""
        believed = self._nodes.get(node) or Believed(NodeState(node=node))
        state = believed.state
        newest = believed.newest
        claimed = newest.digest if isinstance(newest, AllocationsSnapshot) else None
        return View(state.epoch, state.seq, state.digest, claimed)

    def _compare(self, had: NodeState, event: LedgerFact) -> None:
        """A snapshot that comes next after what was received says the same in other words; else one of the two is wrong."""
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
            for node, state in ((node, self._nodes[node].state) for node in sorted(self._nodes))
            if self._nodes[node].newest is not None and node not in self.broken
        ]


def skip(believed: Believed, event: LedgerFact) -> None:
    """What cannot be folded is in a snapshot that comes after it."""
    place = event.epoch, event.seq
    believed.skipped = place if believed.skipped is None else max(believed.skipped, place)


# The type that a subscriber receives for each event.


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event, as a subscriber gets it."""

    event: Event
    position: int
    """Its place in the stream, to go on after: `since=position`. Of a snapshot made up at the start: where it stands."""
    time: float | None
    """Wall seconds at which it became true, as its writer says; None if it does not."""
    body: bytes = b""
    """
    The event in JSON as its writer said it, with what only a later version knows; of a snapshot made up, in ours. Empty of
    what a client without `bodies` has read.
    """
    left_out: bytes = b""
    """SHA-256 of a `UsageObserved` as it was, of which a client without `usage` has left out the contents; else empty."""
    state: NodeState | None = None
    """What is known of the node's allocations after this event, and nothing else of it; None for hardware and usage."""
    anew: bool = False
    """
    Forget what was known the node's allocations, its epoch and seq: this event is a snapshot and replaces them, also
    where its epoch or seq is not greater. So it is where the node's allocator does not stand by what was received before.
    """


def made_up(snapshot: AllocationsSnapshot, state: NodeState, position: int, time: float) -> Delivery:
    """What nobody has said: the allocations of a node as they are at this position."""
    body = msgspec.json.encode(snapshot)
    return Delivery(event=snapshot, position=position, time=time, body=body, state=state, anew=True)


def abridged(usage: UsageObserved) -> tuple[UsageObserved, bytes]:
    """A reading that tells repetitions from news and says nothing else, and the SHA-256 of the whole one."""
    whole = hashlib.sha256(msgspec.json.encode(usage)).digest()
    return msgspec.structs.replace(usage, containers=(), containers_known=False, kubelet=None, exceeding=()), whole


def time_of(message: Message) -> float | None:
    """When the event became true, in wall seconds; None where the header does not say."""
    try:
        return datetime.fromisoformat(message.headers.get("ce-time", "")).timestamp()
    except ValueError:
        return None
