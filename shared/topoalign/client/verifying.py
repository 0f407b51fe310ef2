"""
Checks whether a client's view of a node is what the node's own services confirm.

The numbers of a fact do not prove its writer: a client with the permission to publish can forge one, with any epoch,
seq or revision. So the allocator is asked for its newest fact, and the answer is compared with the view from **before**
the question. The rules:

- same epoch and seq: the digests must be equal;
- a view that is ahead of the answer holds something that the writer has not published: it was believed before the
  question, and the writer answered after it. Facts that arrive after the question do not matter;
- a view that is behind may have a fact under way. It differs only if it is still the same at the next question.

Two different facts with one number are a difference, too.

If allocations differ, the node is in doubt (`Fold.doubt`) and its allocator is asked for a snapshot. The allocator
reports topology and health as discovery confirmed them some seconds ago; so if those seem to differ, discovery is asked
before a conclusion, and is then asked to publish both again, which it does under a new epoch.

If a difference remains after the writer has published again, the questions become less and less frequent: an allocator
of another version may compute digests that this one cannot.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from topoalign.client.fold import REMEDY, Counts, Delivery, Fold, View
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NoFit, Unavailable
from topoalign.core.model.events import Reading
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AliveRequest, AnnounceRequest, ExplainRequest, WriterPosition
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import backoff_seconds

WRITER_SECONDS = 1.0
"""For the writer of a reading to answer."""
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 320.0
"""Seconds before what still differs is asked for again, doubled each time. The first is below the registry's period."""
MISSING = "facts of the allocator are missing"
"""What is found of a view that stays behind; of a node that is known to be broken it is no news."""

T = TypeVar("T")
Place = tuple[int, int]
"""Epoch and seq, or epoch and revision."""
Key = tuple[NodeName, str]
Known = dict[Key, Delivery]
"""Node and kind of reading -> the newest that is believed."""
Heal = Callable[[Fold], Awaitable[None]]
"""Asks the allocators of a fold's broken nodes for snapshots, where that is due."""

log = structlog.get_logger("topoalign.client")


class Unsettled(NamedTuple):
    """Nodes of which it is not certain what is allocated."""

    incomplete: frozenset[NodeName]
    """Events are missing or on their way, or the allocator does not stand by what was received."""
    twins: frozenset[NodeName]
    """Two allocators speak for it, or did a moment ago."""


def kind_of(reading: Reading) -> str:
    """By the name that `WriterPosition.readings` has for it."""
    return wire.SUBJECTS[type(reading)][0].split(".")[0]


class Verifier:
    """Asks the services of a node what they stand by, and has said anew what is believed and not theirs."""

    def __init__(self, bus: Bus, clock: Clock, counts: Counts, heal: Heal) -> None:
        self._bus = bus
        self._clock = clock
        self._counts = counts
        self._heal = heal
        self._folds: list[Fold] = []
        self._known: list[Known] = []
        """What is believed by the iterations under way."""
        self._behind: dict[Key, Place] = {}
        """Readings that were behind their writer at the last question."""
        self._conflicts: dict[Key, Place] = {}
        """Readings of which two had the same epoch and revision: one of them is forged."""
        self._questions: dict[Key, tuple[Place | None, float, int]] = {}
        """What differed at the last question -> where it was, when it was asked for, and how often so far."""

    @property
    def unsettled(self) -> Unsettled:
        """Of all folds that are compared."""
        broken = (fold.broken.keys() | fold.behind for fold in self._folds)
        return Unsettled(frozenset().union(*broken), frozenset().union(*(fold.twins for fold in self._folds)))

    def of_fold(self, fold: Fold) -> AbstractAsyncContextManager[None]:
        """The fold is compared while the context is open."""
        return among(self._folds, fold)

    def of_readings(self, known: Known) -> AbstractAsyncContextManager[None]:
        """These readings are compared while the context is open."""
        return among(self._known, known)

    def look_twice(self, had: Delivery, got: Delivery) -> None:
        """Notes that two readings of a node have the same number and are not the same."""
        one = had.event
        other = got.event
        if not isinstance(one, Reading) or not isinstance(other, Reading):
            return
        place = one.epoch, one.revision
        if place == (other.epoch, other.revision) and (one, had.left_out) != (other, got.left_out):
            self._conflicts[one.node, kind_of(one)] = place

    def forget(self, node: NodeName) -> None:
        """Keeps nothing of this node, and lets nothing be kept that is compared."""
        for fold in self._folds:
            fold.forget(node)
        for kind in ("allocations", *wire.READINGS):
            for kept in (*self._known, self._behind, self._conflicts, self._questions):
                kept.pop((node, kind), None)  # type: ignore[attr-defined]  # mypy joins the maps to object

    async def verify(self, node: NodeName, within: float) -> None:
        """Raises Unavailable if the node's allocator does not answer."""
        views = [(fold, fold.view(node)) for fold in self._folds]
        readings = [places_of(known, node) for known in self._known]
        position = await writer_position_of(self._bus, self._clock, node, within)
        if position.epoch:
            for fold, view in views:
                await self._verify_allocations(fold, node, view, position)
        for places in readings:
            await self._verify_readings(node, places, position.readings)

    async def _verify_allocations(self, fold: Fold, node: NodeName, view: View, position: WriterPosition) -> None:
        finding = None if fold.is_in_doubt(node) else self._difference(fold, node, view, position)
        if finding is not None and not (node in fold.broken and finding == MISSING):
            fold.differ(node, finding)
            fold.doubt(node, (position.epoch, position.seq))
        if node in fold.broken:
            await self._heal(fold)

    def _difference(self, fold: Fold, node: NodeName, view: View, position: WriterPosition) -> str | None:
        """Why the allocator does not stand by what was believed; None if it does, or if that cannot be told yet."""
        place = (view.epoch, view.seq)
        said = (position.epoch, position.seq)
        key = (node, "allocations")
        if place == said and view.digest == position.digest:
            self._questions.pop(key, None)
            fold.agree(node)
            return None
        if place == said:
            # Where the snapshot itself has the allocator's digest, and not the one that is computed of it here, another
            # snapshot will hardly help.
            if (view.claimed == position.digest or key in self._questions) and not self._is_due(key, None):
                return None
            return "the same facts have another digest"
        if place > said:
            return "it is ahead of the allocator"
        if fold.of(node).behind == place:
            return MISSING
        fold.of(node).behind = place
        fold.behind.add(node)
        return None

    async def _verify_readings(self, node: NodeName, places: Mapping[str, Place], said: Mapping[str, Place]) -> None:
        odd = {kind for kind in places.keys() & said.keys() if self._is_odd((node, kind), places[kind], said[kind])}
        of_allocator = {kind for kind in odd if wire.READINGS[kind] == "allocator"}
        if [kind for kind in sorted(of_allocator) if self._differs((node, kind), places[kind])]:
            await self._have_said(wire.admission_subject(node, "announce"), node)
        if odd == of_allocator:
            return
        confirmed = await self._confirmed(node)
        of_others = (odd - of_allocator) & confirmed.keys()
        odd = {kind for kind in of_others if self._is_odd((node, kind), places[kind], confirmed[kind])}
        if [kind for kind in sorted(odd) if self._differs((node, kind), places[kind])]:
            await self._have_said(wire.announce_subject(node), node)

    def _is_odd(self, key: Key, place: Place, said: Place) -> bool:
        """Whether a reading that was believed is not one that its writer stands by."""
        if self._conflicts.get(key) == place:
            return True
        if place == said:
            self._behind.pop(key, None)
            self._conflicts.pop(key, None)
            self._questions.pop(key, None)
            return False
        odd = place > said or self._behind.get(key) == place
        if not odd:
            self._behind[key] = place
        return odd

    def _differs(self, key: Key, place: Place) -> bool:
        """Counts and logs a difference. Returns whether its writer is to be asked."""
        told = key in self._questions
        if not self._is_due(key, place):
            return False
        node, kind = key
        self._counts.differences[kind] += 1
        if not told:
            log.warning(
                "discovery or the allocator does not stand by what was known its node: it is asked to say it anew",
                node=node,
                what=kind,
                had=place,
                remedy=REMEDY,
            )
        return True

    def _is_due(self, key: Key, place: Place | None) -> bool:
        """Whether to ask about this now: at once where it is not what it was when it was asked about, else ever later."""
        now = self._clock.monotonic()
        had, asked, times = self._questions.get(key, (place, now, 0))
        if times and had == place and now < asked + backoff_seconds(times, FIRST_PAUSE, LONGEST_PAUSE):
            return False
        self._questions[key] = place, now, times + 1 if had == place else 1
        return True

    async def _confirmed(self, node: NodeName) -> dict[str, Place]:
        """What discovery stands by; nothing if it does not answer."""
        question = msgspec.json.encode(AliveRequest(node=node))
        try:
            answer = await self._bus.ask(wire.alive_subject(node), question, WRITER_SECONDS)
            return wire.decode_answer(answer, dict[str, Place])
        except (Unavailable, BadRequest, NoFit) as error:
            log.debug("discovery does not answer", node=node, finding=error.finding)
            return {}

    async def _have_said(self, subject: str, node: NodeName) -> None:
        try:
            await self._bus.ask(subject, msgspec.json.encode(AnnounceRequest(node=node)), WRITER_SECONDS)
        except Unavailable as error:
            log.debug("nothing is said anew", node=node, finding=error.finding)


async def writer_position_of(bus: Bus, clock: Clock, node: NodeName, within: float) -> WriterPosition:
    """
    What the allocator of a node stands by; an empty one of a version that does not tell. Raises Unavailable if it does not
    answer within so many seconds.
    """
    until = clock.monotonic() + within
    question = msgspec.json.encode(AliveRequest(node=node))
    try:
        return wire.decode_answer(
            await bus.ask(wire.admission_subject(node, "alive"), question, within), WriterPosition
        )
    except (BadRequest, NoFit):
        return WriterPosition()
    except Unavailable:
        left = until - clock.monotonic()
        if left <= 0:
            raise
    older = msgspec.json.encode(ExplainRequest(node=node, target=""))  # a version without `alive` answers this one
    await bus.ask(wire.admission_subject(node, "explain"), older, left)
    return WriterPosition()


def places_of(known: Known, node: NodeName) -> dict[str, Place]:
    """The readings of a node that are believed, by kind."""
    events = {kind: known[node, kind].event for kind in wire.READINGS if (node, kind) in known}
    return {kind: (event.epoch, event.revision) for kind, event in events.items() if isinstance(event, Reading)}


@asynccontextmanager
async def among(believed: list[T], one: T) -> AsyncIterator[None]:
    """One more is in the list while the context is open."""
    believed.append(one)
    try:
        yield
    finally:
        believed[:] = [other for other in believed if other is not one]
