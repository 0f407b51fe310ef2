"""
Which of the cards that fit are connected best, and what the links between two cards are worth.

Of several cards, the set with the highest sum of pair scores; of equal ones the first in the order in which cards are
tried. For one card it is the other way round: the one with the lowest sum of scores to the others that fit, so that
well connected cards stay together. Three cards with scores 0-1: 100, 0-2: 200, 1-2: 150 give card 1 to whoever wants
one, and 0 and 2 to whoever wants two.

A score that nobody has published is 0 (upstream publishes them only where the policy of the whole cluster is
`topology-aware`). This is about one node: upstream chooses the node without it.

Source: HAMi 4707fb02, calculate_score and Fit.
"""

from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.sharing.hami.registration import LinkScores, PairScores

MOST_NVLINKS = 18
"""Of a pair of cards. More have no name upstream, and count nothing."""
MOST_STEPS = 200_000
"""Sets looked at until the search ends with TooMuchWork; 8 of 16 cards need at most 13,000."""

GpuLink = PcieClass | int
"""The path over PCIe, or a number of NVLinks."""


class GpuLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A card with its links to others."""

    uuid: str
    index: int
    links: Mapping[int, tuple[GpuLink, ...]] = {}
    """By the index of the other card."""

    def to(self, other: "GpuLinks") -> tuple[GpuLink, ...]:
        """The links to another card."""
        return self.links.get(other.index, ())


def pick_best_connected(cards: Sequence[str], count: int, scores: PairScores) -> tuple[int, ...]:
    """
    Positions of `count` of these cards, given by uuid in the order in which they are tried; ascending.

    Raises TooMuchWork.
    """
    if count >= len(cards):
        return tuple(range(len(cards)))
    if count == 1:
        return (_loosest(cards, scores),)
    return _Search(cards, count, scores).best


def link_scores(gpus: Sequence[GpuLinks]) -> tuple[LinkScores, ...]:
    """The annotation's scores of each card to each other one."""
    return tuple(LinkScores(a.uuid, {b.uuid: hami_link_score(a, b) for b in gpus if b is not a}) for a in gpus)


def hami_link_score(a: GpuLinks, b: GpuLinks) -> int:
    """What the links from one card to another are worth; 0 where the other shows more links or fewer."""
    return 0 if asymmetric(a, b) else sum(link_score(each) for each in a.to(b))


def asymmetric(a: GpuLinks, b: GpuLinks) -> bool:
    """Whether two cards show different numbers of links to one another, as with a broken NVLink: a Warning of the node."""
    return len(a.to(b)) != len(b.to(a))


def link_score(link: GpuLink) -> int:
    """What one entry of a list of links is worth."""
    if isinstance(link, PcieClass):
        return PCIE_SCORE[link]
    return link * NVLINK_SCORE if 0 < link <= MOST_NVLINKS else 0


def nvlinks_between(direct: int, to_switch: tuple[int, int]) -> int:
    """NVLinks between two cards: the direct ones, or where there are none the fewer of both cards' links to NVSwitches."""
    return direct or min(to_switch)


def _loosest(cards: Sequence[str], scores: PairScores) -> int:
    """Position of the card with the lowest sum of scores to the others."""

    def total(position: int) -> int:
        row = scores.get(cards[position], {})
        return sum(row.get(other, 0) for other in cards if other != cards[position])

    return min(range(len(cards)), key=lambda position: (total(position), position))


class _Search:
    """
    Sets of `count` cards in the order of their positions, the first of the best kept.

    A branch ends where even the best scores that are left cannot exceed what was found.
    """

    def __init__(self, cards: Sequence[str], count: int, scores: PairScores) -> None:
        rows = [scores.get(card, {}) for card in cards]
        self.size = len(cards)
        self.scores = [[row.get(card, 0) for card in cards] for row in rows]
        self.highest = [0] * self.size
        """By position: the highest score of a pair from there on."""
        for start in range(self.size - 2, -1, -1):
            self.highest[start] = max(self.scores[start][start + 1 :])
            if start < self.size - 2:
                self.highest[start] = max(self.highest[start], self.highest[start + 1])
        self.best: tuple[int, ...] = ()
        self.best_score: int | None = None
        self.steps = 0
        self._extend((), 0, count, [0] * self.size)

    def _extend(self, chosen: tuple[int, ...], score: int, more: int, gains: list[int]) -> None:
        """`gains` by position: the sum of its scores to those chosen."""
        self._step()
        if more == 0:
            if self.best_score is None or score > self.best_score:
                self.best = chosen
                self.best_score = score
            return
        for position in range(chosen[-1] + 1 if chosen else 0, self.size - more + 1):
            if self.best_score is not None and score + self._bound(position, more, gains) <= self.best_score:
                return  # what is left from here on is left from the next position on, too
            row = self.scores[position]
            taken = [gain + row[other] for other, gain in enumerate(gains)]
            self._extend((*chosen, position), score + gains[position], more - 1, taken)

    def _bound(self, start: int, more: int, gains: list[int]) -> int:
        """What `more` cards from `start` on add at most."""
        pairs = more * (more - 1) // 2
        return sum(sorted(gains[start:])[-more:]) + (pairs * self.highest[start] if pairs else 0)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooMuchWork(
                "which of the cards that fit are connected best was not found within the limit on work",
                "ask for fewer cards, or without the policy topology-aware",
            )
