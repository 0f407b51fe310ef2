"""
Chooses the best connected of the GPUs that fit, and scores the links between two GPUs.

A request for several GPUs gets the set with the highest sum of pair scores; of equal sets, the first one in the order
in which GPUs are tried. A request for one GPU gets the GPU with the lowest sum of scores to the others that fit, so
that well connected GPUs stay available together. Example with three GPUs and the scores 0-1: 100, 0-2: 200, 1-2: 150: a
request for one GPU gets GPU 1, and a request for two gets GPUs 0 and 2.

A score that is not published is 0. Upstream publishes scores only if the policy of the whole cluster is
`topology-aware`. The scores matter only within one node: upstream chooses the node without them.

Source: HAMi 4707fb02, calculate_score and Fit.
"""

from collections.abc import Sequence
from itertools import combinations
from math import comb

from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.sharing.hami.registration import PairScores

MOST_NVLINKS = 18
"""Maximum number of NVLinks of a pair of GPUs. Upstream has no name for a larger number, so its score is 0."""
MOST_SETS = 20_000
"""Maximum number of sets that are compared. If there are more, TooMuchWork is raised. 16 GPUs have 12,870 sets of 8."""

GpuLink = PcieClass | int
"""The PCIe path, or the number of NVLinks."""


def pick_best_connected(gpus: Sequence[str], count: int, scores: PairScores) -> tuple[int, ...]:
    """The positions of the `count` chosen GPUs, ascending. `gpus`: uuids, tried in this order. Raises TooMuchWork."""
    if count >= len(gpus):
        return tuple(range(len(gpus)))
    if count == 1:
        rows = [scores.get(gpu, {}) for gpu in gpus]
        totals = [sum(row.get(other, 0) for other in gpus if other != gpu) for gpu, row in zip(gpus, rows, strict=True)]
        return (totals.index(min(totals)),)
    table = [[scores.get(gpu, {}).get(other, 0) for other in gpus] for gpu in gpus]
    if len({table[a][b] for a, b in combinations(range(len(gpus)), 2)}) == 1:  # on an NVSwitch, or MIG
        return tuple(range(count))
    if comb(len(gpus), count) > MOST_SETS:
        raise TooMuchWork(
            "which of the GPUs that fit are connected best was not found within the limit on work",
            "ask for fewer GPUs, or without the policy topology-aware",
        )
    sets = combinations(range(len(gpus)), count)
    return max(sets, key=lambda chosen: sum(table[a][b] for a, b in combinations(chosen, 2)))


def link_score(link: GpuLink) -> int:
    """The score of a PCIe path or of a number of NVLinks."""
    if isinstance(link, PcieClass):
        return PCIE_SCORE[link]
    return link * NVLINK_SCORE if 0 < link <= MOST_NVLINKS else 0
