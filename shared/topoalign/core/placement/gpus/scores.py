"""What the links between some devices are worth, as a table of numbers that the choosing functions work on."""

from collections.abc import Iterable, Sequence
from itertools import combinations

from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score
from topoalign.core.model.topology.views import made_once

Scores = Sequence[Sequence[int]]
"""Row and column i belong to the i-th device; symmetric, 0 on the diagonal."""
Members = tuple[int, ...]
"""GPUs by their positions on the machine, ascending."""


@made_once
def gpu_scores(topology: Topology) -> Scores:
    """The table of the pair scores of all GPUs of a machine, in the hardware's order."""
    gpus = tuple(topology.gpu_by_id)
    table = [[0] * len(gpus) for _ in gpus]
    for (i, a), (j, b) in combinations(enumerate(gpus), 2):
        table[i][j] = table[j][i] = pair_score(topology, a, b)
    return table


def total(scores: Scores, members: Iterable[int]) -> int:
    """The score of a set: the sum over all its pairs."""
    return sum([scores[a][b] for a, b in combinations(members, 2)])
