"""
Asks the allocators of nodes with missing events for snapshots, which come over the stream.

An allocator is asked again when no snapshot has closed the gap. The interval grows if it promised one, and the number of
requests is limited by `MOST_ASKS`, because another client's forged facts may cause the gaps.
"""

from functools import partial
from itertools import takewhile
from math import inf
from weakref import WeakKeyDictionary

import msgspec
import structlog

from topoalign.client.node_folds import Believed, Fold
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NoFit, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.tasks import for_each

SNAPSHOT_SECONDS = 1.0
"""Time-out of a request for a snapshot. One that is down is known at once; only one that hangs takes this long."""
ASK_AGAIN_SECONDS = 6.0
"""
Until a snapshot or the end of a stream that did not come is requested again. Longer than the silence a follower allows.
"""
LONGEST_ASK_AGAIN_SECONDS = 600.0
"""
Upper bound of the backoff after snapshots that do not close the gap: an allocator of another version rewrites its journal
for each.
"""
MOST_ASKS = 10
"""Requests to one allocator within ASK_AGAIN_SECONDS, however many gaps forged facts make meanwhile."""

LONGEST_SILENT_SECONDS = 60.0
"""Upper bound of the backoff for an allocator that does not answer. When it starts, it publishes its snapshot unasked."""
ASKED_AT_ONCE = 256
"""Allocators that are asked at the same time."""
MOST_DUE = 1024
"""Allocators that are asked before the next events are read: forged facts can name thousands of nodes."""
EACH_SECONDS = 1e-5
"""All broken nodes are checked again after this time for each of them: with thousands of them, not at every event."""

log = structlog.get_logger("topoalign.client")


class Healer:
    """Requests snapshots for one client."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._looked = WeakKeyDictionary[Fold, float]()
        """When all broken nodes of a fold were looked at, in monotonic seconds."""
        self._asked: dict[NodeName, tuple[float, int]] = {}
        """Node -> since when its asks are counted, and how often it was asked for a snapshot since."""

    async def heal(self, fold: Fold) -> None:
        """Asks the allocators of nodes with missing events for a snapshot; it comes over the stream."""
        now = self._clock.monotonic()
        last = self._looked.get(fold, -inf)
        if now >= last + len(fold.broken) * EACH_SECONDS:
            self._looked[fold] = now
            due = [node for node, believed in fold.broken.items() if now >= due_at(believed)]
        else:
            due = [*takewhile(lambda node: fold.broken[node].asked is None, reversed(fold.broken))]
        due.sort(key=lambda node: fold.broken[node].silent > 0)  # who has answered is asked first
        await for_each(due[:MOST_DUE], partial(self._ask, fold), at_once=ASKED_AT_ONCE)

    def forget(self, node: NodeName) -> None:
        """Keeps nothing of this node."""
        self._asked.pop(node, None)

    async def _ask(self, fold: Fold, node: NodeName) -> None:
        """Asks once, unless the node's allocator was asked `MOST_ASKS` times recently."""
        if node not in fold.broken:  # a snapshot came in the meantime
            return
        now = self._clock.monotonic()
        since, times = self._asked.get(node, (now, 0))
        since, times = (since, times) if now < since + ASK_AGAIN_SECONDS else (now, 0)
        if times >= MOST_ASKS:
            return
        self._asked[node] = since, times + 1
        fold.of(node).asked = now
        question = msgspec.json.encode(NodeRequest(node=node))
        try:
            answer = await self._bus.ask(wire.admission_subject(node, "snapshot"), question, SNAPSHOT_SECONDS)
            if node in fold:  # else it was forgotten meanwhile
                fold.of(node).answered += 1
                fold.promise(node, *wire.decode_answer(answer, tuple[int, int]))
                fold.of(node).silent = 0
        except (Unavailable, BadRequest, NoFit) as error:
            # The node may be gone for good, and its last events stay in the stream for a month.
            if node in fold:
                if not fold.of(node).silent:
                    log.info("no snapshot yet", node=node, finding=error.finding)
                fold.of(node).silent += 1


def due_at(believed: Believed) -> float:
    """The monotonic second at which the allocator of a broken node is to be asked for a snapshot."""
    if believed.asked is None:
        return -inf
    if believed.silent:
        return believed.asked + backoff_seconds(believed.silent, ASK_AGAIN_SECONDS, LONGEST_SILENT_SECONDS)
    return believed.asked + backoff_seconds(believed.answered + 1, ASK_AGAIN_SECONDS, LONGEST_ASK_AGAIN_SECONDS)
