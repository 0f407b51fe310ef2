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
from itertools import combinations
from math import comb

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.sharing.hami.registration import PairScores

MOST_NVLINKS = 18
"""Of a pair of GPUs. More have no name upstream, and do not count."""
MOST_SETS = 20_000
"""Sets that are compared; of more the search ends with TooMuchWork. 8 of 16 GPUs are 12,870 sets."""

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
    table = [[scores.get(gpu, {}).get(other, 0) for other in gpus] for gpu in gpus]
    if len({table[a][b] for a, b in combinations(range(len(gpus)), 2)}) == 1:  # of GPUs at switches, MIG instances
        return tuple(range(count))
    if comb(len(gpus), count) > MOST_SETS:
        raise TooMuchWork(
            "which of the GPUs that fit are connected best was not found within the limit on work",
            "ask for fewer GPUs, or without the policy topology-aware",
        )
    sets = combinations(range(len(gpus)), count)
    return max(sets, key=lambda chosen: sum(table[a][b] for a, b in combinations(chosen, 2)))


def link_score(link: GpuLink) -> int:
    """The score of one entry of a list of links."""
    if isinstance(link, PcieClass):
        return PCIE_SCORE[link]
    return link * NVLINK_SCORE if 0 < link <= MOST_NVLINKS else 0
