"""
Chooses the best connected of the GPUs that fit, and scores the links between two GPUs.

Of several GPUs, the set with the highest sum of pair scores; of equal ones the first in the order in which GPUs are
tried. For one GPU it is the other way round: the one with the lowest sum of scores to the others that fit, so that
well connected GPUs stay together. Three GPUs with scores 0-1: 100, 0-2: 200, 1-2: 150 give GPU 1 to a request for
one, and GPUs 0 and 2 to a request for two.

A score that nobody has published is 0 (upstream publishes them only where the policy of the whole cluster is
`topology-aware`). This applies within one node: upstream chooses the node without it.

Source: HAMi 4707fb02, calculate_score and Fit.
"""

from collections.abc import Sequence

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.sharing.hami.registration import PairScores

MOST_NVLINKS = 18
"""Of a pair of GPUs. More have no name upstream, and do not count."""
MOST_STEPS = 200_000
"""Sets compared until the search ends with TooMuchWork; 8 of 16 GPUs need at most 13,000."""

GpuLink = PcieClass | int
"""The path over PCIe, or a number of NVLinks."""


def pick_best_connected(gpus: Sequence[str], count: int, scores: PairScores) -> tuple[int, ...]:
    """Positions of `count` of these uuids, which are in the order in which they are tried; ascending. Raises TooMuchWork."""
    if count >= len(gpus):
        return tuple(range(len(gpus)))
    if count == 1:
        rows = [scores.get(gpu, {}) for gpu in gpus]
        totals = [sum(row.get(other, 0) for other in gpus if other != gpu) for gpu, row in zip(gpus, rows, strict=True)]
        return (totals.index(min(totals)),)
    return _Search(gpus, count, scores).best


def link_score(link: GpuLink) -> int:
    """The score of one entry of a list of links."""
    if isinstance(link, PcieClass):
        return PCIE_SCORE[link]
    return link * NVLINK_SCORE if 0 < link <= MOST_NVLINKS else 0


class _Search:
    """
    Sets of `count` GPUs in the order of their positions, the first of the best kept.

    A branch ends where even the best scores that are left cannot exceed what was found.
    """

    def __init__(self, gpus: Sequence[str], count: int, scores: PairScores) -> None:
        rows = [scores.get(gpu, {}) for gpu in gpus]
        self.size = len(gpus)
        self.scores = [[row.get(gpu, 0) for gpu in gpus] for row in rows]
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
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooMuchWork(
                "which of the GPUs that fit are connected best was not found within the limit on work",
                "ask for fewer GPUs, or without the policy topology-aware",
            )
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
        """What `more` GPUs from `start` on add at most."""
        pairs = more * (more - 1) // 2
        return sum(sorted(gains[start:])[-more:]) + (pairs * self.highest[start] if pairs else 0)
