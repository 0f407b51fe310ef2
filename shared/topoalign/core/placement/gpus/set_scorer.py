"""
Scores sets of GPUs of one machine: their weakest seam, the links among them, and the links that they cut.

Each score of a set is cached, because the same GPUs stay free between two pods.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from topoalign.core.model.topology.device_links import NVLINK_SCORE
from topoalign.core.placement.gpus.seam import Links, Members, Scores, Seam, total_score, weakest_seam

MOST_KEPT = 4096
"""Scores of each kind that are cached: for a machine with eight GPUs those of all 256 sets."""

Asked = tuple[object, ...]
"""What an answer depends on."""


class SetScorer:
    """Scores sets of GPUs of one machine. Keep one per machine."""

    def __init__(self, scores: Scores, links: Links | None = None) -> None:
        """`scores`: of all pairs (`connection_score`); `links`: None where nothing but the scores is known."""
        self.scores = scores
        self.links = Links(scores, ()) if links is None else links
        self._seams: dict[Members, Seam] = {}
        self._own: dict[Members, int] = {}
        self._chosen: dict[Asked, Members] = {}

    def seam(self, members: Members) -> Seam:
        """The weakest seam of a set."""
        seam = self._seams.get(members)
        if seam is None:
            seam = keep(self._seams, members, weakest_seam(self.links, members))
        return seam

    @cached_property
    def _fabric_links(self) -> Scores:
        return [[strength // NVLINK_SCORE for strength in row] for row in self.links.strength]

    def most_links(self, members: Members) -> int:
        """An upper bound for the fabric links of its seam: those of the member that has the fewest to the others."""
        if any(count for _, count in self.links.switch):  # known at once
            return self.seam(members).fabric_links
        rows = map(self._fabric_links.__getitem__, members)
        return min([sum([row[other] for other in members]) for row in rows], default=0)

    def own(self, members: Members) -> int:
        """The sum of the scores of all links among the members."""
        own = self._own.get(members)
        if own is None:
            own = keep(self._own, members, total_score(self.scores, members))
        return own

    def describe(self, members: Members) -> str:
        """The seam of a set for people: `4 NVLinks, 80 GB/s`."""
        return self.seam(members).text(self.links.model)

    def links_to(self, free: Iterable[int]) -> Sequence[int]:
        """For each GPU of the machine the sum of the scores of its links to these GPUs."""
        columns = tuple(free)
        return [sum([row[column] for column in columns]) for row in self.scores]

    def chosen(self, asked: Asked, choose: Callable[[], Members]) -> Members:
        """Returns the answer to a question, which is computed once."""
        chosen = self._chosen.get(asked)
        return keep(self._chosen, asked, choose()) if chosen is None else chosen


Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(kept: dict[Key, Value], key: Key, value: Value) -> Value:
    """Caches a value, and drops all others where there are too many."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value
