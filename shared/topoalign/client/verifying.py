"""
Checks whether the services of a node confirm a client's view of the node.

Epoch and seq do not prove who wrote a fact, because a client with the permission to publish can forge one. So the
allocator is asked for its newest fact, and the answer is compared with the view from **before** the request:

- With the same epoch and seq, the digests must be equal.
- A view that is ahead of the answer contains a fact that the writer has not published.
- A view that is behind may still receive a fact. It differs only if it has not changed at the next request.

If allocations differ, the node is unconfirmed (`Fold.mark_unconfirmed`), and a snapshot is requested from its
allocator. The allocator reports topology and health as discovery confirmed them some seconds ago. So if these seem to
differ, discovery is asked, too. If it does not confirm them, it is asked to publish both again, under a new epoch.

If a difference remains after the writer has published again, the interval between requests grows, because an allocator
of another version can compute other digests.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from topoalign.client.node_folds import REMEDY, Believed, Counts, Delivery, Fold
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NoFit, Unavailable
from topoalign.core.model.events import AllocationsSnapshot, Reading
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest, WriterPosition
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import backoff_seconds

WRITER_SECONDS = 1.0
"""Timeout of a request to the writer of a reading."""
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 320.0
"""
Seconds until a remaining difference is counted again: the first and the longest interval. It doubles each time. The
first is shorter than the interval of the registry's checks.
"""
MISSING = "facts of the allocator are missing"
"""The finding about a view that stays behind. It is not counted for a node that is already known to be broken."""

T = TypeVar("T")
Place = tuple[int, int]
"""Epoch and seq, or epoch and revision."""
Key = tuple[NodeName, str]
Known = dict[Key, Delivery]
"""Node and kind of reading -> its newest accepted reading."""
Heal = Callable[[Fold], Awaitable[None]]
"""Requests snapshots from the allocators of a fold's broken nodes, if due."""

log = structlog.get_logger("topoalign.client")


class Unsettled(NamedTuple):
    """Nodes whose allocations are not certain."""

    incomplete: frozenset[NodeName]
    """Nodes with missing or delayed events, or whose allocator does not confirm what was received."""
    duplicate_agents: frozenset[NodeName]
    """Nodes for which two allocators publish, or published recently."""


def reading_kind(reading: Reading) -> str:
    """The name of a reading in `WriterPosition.readings`: `topology`, `health`, `usage`."""
    return wire.SUBJECTS[type(reading)][0].split(".")[0]


class Verifier:
    """Compares the views of a client with what a node's services confirm. Requests facts again if they differ."""

    def __init__(self, bus: Bus, clock: Clock, counts: Counts, heal: Heal) -> None:
        self._bus = bus
        self._clock = clock
        self._counts = counts
        self._heal = heal
        self.folds: list[Fold] = []
        """The allocations of each running iteration, which are compared."""
        self.known: list[Known] = []
        """The readings of each running iteration, which are compared."""
        self._behind: dict[Key, Place] = {}
        """Readings that were behind their writer at the last check."""
        self._conflicts: dict[Key, Place] = {}
        """Readings of which two had the same epoch and revision: one of them is forged."""
        self._questions: dict[Key, tuple[Place | None, float, int]] = {}
        """
        Reading or `allocations` that differed at the last check -> epoch and revision (None for `allocations`),
        monotonic seconds of the last request, and number of requests.
        """

    @property
    def unsettled(self) -> Unsettled:
        """The unsettled nodes of all folds that are compared."""
        broken = (fold.broken.keys() | fold.behind for fold in self.folds)
        return Unsettled(frozenset().union(*broken), frozenset().union(*(fold.duplicate_agents for fold in self.folds)))

    def is_settled(self, node: NodeName) -> bool:
        """Whether the node's allocations are certain now."""
        return not any(
            node in fold.broken or node in fold.behind or node in fold.duplicate_agents for fold in self.folds
        )

    def compare_revisions(self, had: Delivery, got: Delivery) -> None:
        """Notes a conflict if two readings of a node have the same epoch and revision but differ."""
        one = had.event
        other = got.event
        if not isinstance(one, Reading) or not isinstance(other, Reading):
            return
        place = one.epoch, one.revision
        if place == (other.epoch, other.revision) and one != other:
            self._conflicts[one.node, reading_kind(one)] = place

    def forget(self, node: NodeName) -> None:
        """Drops everything that is kept of this node, also in the folds and readings that are compared."""
        for fold in self.folds:
            fold.forget(node)
        for kind in ("allocations", *wire.READINGS):
            for kept in (*self.known, self._behind, self._conflicts, self._questions):
                kept.pop((node, kind), None)  # type: ignore[attr-defined]  # mypy joins the maps to object

    async def verify(self, node: NodeName, within: float) -> None:
        """Compares the views of a node. Raises Unavailable if the node's allocator does not answer."""
        views = [(fold, fold.view(node)) for fold in self.folds]
        readings = [believed_positions(known, node) for known in self.known]
        position = await writer_position_of(self._bus, node, within)
        if position.epoch:
            for fold, view in views:
                await self._verify_allocations(fold, node, view, position)
        for places in readings:
            await self._verify_readings(node, places, position.readings)

    async def _verify_allocations(self, fold: Fold, node: NodeName, view: Believed, position: WriterPosition) -> None:
        finding = None if fold.is_unconfirmed(node) else self._find_difference(fold, node, view, position)
        if finding is not None and not (node in fold.broken and finding == MISSING):
            fold.count_difference(node, finding)
            fold.mark_unconfirmed(node, (position.epoch, position.seq))
        if node in fold.broken:
            await self._heal(fold)

    def _find_difference(self, fold: Fold, node: NodeName, view: Believed, position: WriterPosition) -> str | None:
        """Why the allocator does not confirm the view; None if it does, or if that is not certain yet."""
        place = (view.state.epoch, view.state.seq)
        confirmed_place = (position.epoch, position.seq)
        key = (node, "allocations")
        if place == confirmed_place and view.state.digest == position.digest:
            self._questions.pop(key, None)
            fold.count_agreement(node)
            return None
        if place == confirmed_place:
            # If the snapshot has the allocator's digest and the digest computed here differs, another snapshot is unlikely
            # to help.
            claimed = view.newest.digest if isinstance(view.newest, AllocationsSnapshot) else None
            if (claimed == position.digest or key in self._questions) and not self._is_due(key, None):
                return None
            return "the same facts have another digest"
        if place > confirmed_place:
            return "it is ahead of the allocator"
        if fold.of(node).behind == place:
            return MISSING
        fold.of(node).behind = place
        fold.behind.add(node)
        return None

    async def _verify_readings(
        self, node: NodeName, places: Mapping[str, Place], confirmed_place: Mapping[str, Place]
    ) -> None:
        unconfirmed = {
            kind
            for kind in places.keys() & confirmed_place.keys()
            if self._is_unconfirmed((node, kind), places[kind], confirmed_place[kind])
        }
        of_allocator = {kind for kind in unconfirmed if wire.READINGS[kind] == "allocator"}
        if [kind for kind in sorted(of_allocator) if self._count_difference((node, kind), places[kind])]:
            await self._request_announcement(wire.admission_subject(node, "announce"), node)
        if unconfirmed == of_allocator:
            return
        confirmed = await self._ask_discovery(node)
        of_others = (unconfirmed - of_allocator) & confirmed.keys()
        unconfirmed = {kind for kind in of_others if self._is_unconfirmed((node, kind), places[kind], confirmed[kind])}
        if [kind for kind in sorted(unconfirmed) if self._count_difference((node, kind), places[kind])]:
            await self._request_announcement(wire.discovery_subject(node, "announce"), node)

    def _is_unconfirmed(self, key: Key, place: Place, confirmed_place: Place) -> bool:
        if self._conflicts.get(key) == place:
            return True
        if place == confirmed_place:
            self._behind.pop(key, None)
            self._conflicts.pop(key, None)
            self._questions.pop(key, None)
            return False
        unconfirmed = place > confirmed_place or self._behind.get(key) == place
        if not unconfirmed:
            self._behind[key] = place
        return unconfirmed

    def _count_difference(self, key: Key, place: Place) -> bool:
        """Counts and logs a difference if due. Returns whether its writer is to be asked to publish again."""
        logged = key in self._questions
        if not self._is_due(key, place):
            return False
        node, kind = key
        self._counts.differences[kind] += 1
        if not logged:
            log.warning(
                "discovery or the allocator does not confirm what was received of its node: it is asked to publish again",
                node=node,
                what=kind,
                had=place,
                remedy=REMEDY,
            )
        return True

    def _is_due(self, key: Key, place: Place | None) -> bool:
        """Whether to ask now: at once if the reading has changed since the last request, else after a growing pause."""
        now = self._clock.monotonic()
        had, asked, times = self._questions.get(key, (place, now, 0))
        if times and had == place and now < asked + backoff_seconds(times, FIRST_PAUSE, LONGEST_PAUSE):
            return False
        self._questions[key] = place, now, times + 1 if had == place else 1
        return True

    async def _ask_discovery(self, node: NodeName) -> dict[str, Place]:
        """The readings that discovery confirms; empty if it does not answer."""
        question = msgspec.json.encode(NodeRequest(node=node))
        try:
            answer = await self._bus.ask(wire.discovery_subject(node, "alive"), question, WRITER_SECONDS)
            return wire.decode_answer(answer, dict[str, Place])
        except (Unavailable, BadRequest, NoFit) as error:
            log.debug("discovery does not answer", node=node, finding=error.finding)
            return {}

    async def _request_announcement(self, subject: str, node: NodeName) -> None:
        try:
            await self._bus.ask(subject, msgspec.json.encode(NodeRequest(node=node)), WRITER_SECONDS)
        except Unavailable as error:
            log.debug("the writer does not publish again", node=node, finding=error.finding)


async def writer_position_of(bus: Bus, node: NodeName, within: float) -> WriterPosition:
    """The position that a node's allocator confirms; an empty one if it refuses. Raises Unavailable without an answer."""
    question = msgspec.json.encode(NodeRequest(node=node))
    try:
        answer = await bus.ask(wire.admission_subject(node, "alive"), question, within)
        return wire.decode_answer(answer, WriterPosition)
    except (BadRequest, NoFit):
        return WriterPosition()


def believed_positions(known: Known, node: NodeName) -> dict[str, Place]:
    """Kind of reading -> epoch and revision of the newest one of a node."""
    events = {kind: known[node, kind].event for kind in wire.READINGS if (node, kind) in known}
    return {kind: (event.epoch, event.revision) for kind, event in events.items() if isinstance(event, Reading)}


@asynccontextmanager
async def listed_while_open(believed: list[T], one: T) -> AsyncIterator[None]:
    """Keeps an element in the list while the context is open."""
    believed.append(one)
    try:
        yield
    finally:
        believed[:] = [other for other in believed if other is not one]
