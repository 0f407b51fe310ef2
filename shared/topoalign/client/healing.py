"""
Requests snapshots from the allocators of nodes with missing events. The snapshots arrive in the stream.

A snapshot is requested again if none has closed the gap. The interval grows with each promised snapshot and with each
request without an answer. `MOST_ASKS` limits the requests, because forged facts of another client can cause gaps.
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
"""Timeout of a request for a snapshot. Only hanging allocators reach it; one that is down is noticed at once."""
ASK_AGAIN_SECONDS = 6.0
"""
Seconds until a snapshot that did not arrive is requested again, or the end of a stream is read again. Longer than the
silence after which a follower assumes that a batch is lost.
"""
LONGEST_ASK_AGAIN_SECONDS = 600.0
"""
Maximum backoff after snapshots that do not close the gap, for example those of another version. Each new snapshot makes
the allocator rewrite its journal.
"""
MOST_ASKS = 10
"""Maximum number of requests to one allocator within ASK_AGAIN_SECONDS, even if forged facts cause more gaps."""

LONGEST_SILENT_SECONDS = 60.0
"""Maximum backoff for an allocator that does not answer. When it starts, it publishes a snapshot without a request."""
ASKED_AT_ONCE = 256
"""Maximum number of concurrent requests to allocators."""
MOST_DUE = 1024
"""Maximum number of requests before the next events are read, because forged facts can name thousands of nodes."""
EACH_SECONDS = 1e-5
"""Seconds per broken node between two checks of all of them, so that thousands are not checked at every event."""

log = structlog.get_logger("topoalign.client")


class Healer:
    """Requests snapshots for one client."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._looked = WeakKeyDictionary[Fold, float]()
        """Fold -> monotonic seconds of the last check of all its broken nodes."""
        self._asked: dict[NodeName, tuple[float, int]] = {}
        """Node -> monotonic seconds since which requests to it are counted, and their number."""

    async def heal(self, fold: Fold) -> None:
        """Requests snapshots from the allocators of nodes with missing events, if due. They arrive in the stream."""
        now = self._clock.monotonic()
        last = self._looked.get(fold, -inf)
        if now >= last + len(fold.broken) * EACH_SECONDS:
            self._looked[fold] = now
            due = [node for node, believed in fold.broken.items() if now >= due_at(believed)]
        else:
            due = [*takewhile(lambda node: fold.broken[node].asked is None, reversed(fold.broken))]
        due.sort(key=lambda node: fold.broken[node].silent > 0)  # those that answered last time come first
        await for_each(due[:MOST_DUE], partial(self._ask, fold), at_once=ASKED_AT_ONCE)

    def forget(self, node: NodeName) -> None:
        """Drops everything that is kept of this node."""
        self._asked.pop(node, None)

    async def _ask(self, fold: Fold, node: NodeName) -> None:
        """Requests a snapshot, unless `MOST_ASKS` requests were sent to the node's allocator recently."""
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
            if node in fold:  # otherwise it was forgotten in the meantime
                fold.of(node).answered += 1
                fold.promise(node, *wire.decode_answer(answer, tuple[int, int]))
                fold.of(node).silent = 0
        except (Unavailable, BadRequest, NoFit) as error:
            # The node may be gone permanently, and its last events stay in the stream for a month.
            if node in fold:
                if not fold.of(node).silent:
                    log.info("no snapshot yet", node=node, finding=error.finding)
                fold.of(node).silent += 1


def due_at(believed: Believed) -> float:
    """When a snapshot is due from the allocator of a broken node, in monotonic seconds; -inf: now."""
    if believed.asked is None:
        return -inf
    if believed.silent:
        return believed.asked + backoff_seconds(believed.silent, ASK_AGAIN_SECONDS, LONGEST_SILENT_SECONDS)
    return believed.asked + backoff_seconds(believed.answered + 1, ASK_AGAIN_SECONDS, LONGEST_ASK_AGAIN_SECONDS)
