"""What the links between some devices are worth, as a table of numbers that the choosing functions work on."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score
from topoalign.core.model.topology.views import made_once

Scores = Sequence[Sequence[int]]
"""Row and column i belong to the i-th device; symmetric, 0 on the diagonal."""
Table = tuple[tuple[int, ...], ...]
"""Scores that can be remembered by."""


def link_scores(topology: Topology, devices: Sequence[DeviceID]) -> Scores:
    """The table of the pair scores of these devices, in their order."""
    table = [[0] * len(devices) for _ in devices]
    for (i, a), (j, b) in combinations(enumerate(devices), 2):
        table[i][j] = table[j][i] = pair_score(topology, a, b)
    return table


@made_once
def gpu_scores(topology: Topology) -> Scores:
    """The table of the pair scores of all GPUs of a machine, in the hardware's order."""
    return link_scores(topology, tuple(topology.gpu_by_id))


def scores_among(topology: Topology, gpus: Sequence[DeviceID]) -> Table:
    """The table of the pair scores of some of the machine's GPUs, in their order."""
    scores, position = gpu_scores(topology), {gpu: i for i, gpu in enumerate(topology.gpu_by_id)}
    rows = [position[gpu] for gpu in gpus]
    return tuple(tuple(scores[row][column] for column in rows) for row in rows)


def total(scores: Scores, members: Iterable[int]) -> int:
    """The score of a set: the sum over all its pairs."""
    return sum([scores[a][b] for a, b in combinations(members, 2)])


@lru_cache(maxsize=256)
def totals(table: Table, size: int) -> tuple[int, ...]:
    """The total of each set of `size`, in the order of `combinations`. Cached, for few sets of free GPUs occur."""
    return tuple(total(table, members) for members in combinations(range(len(table)), size))
