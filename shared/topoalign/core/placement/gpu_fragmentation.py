"""Measures how fragmented the free GPUs are. It compares their best connected sets with those of the empty machine."""

from collections.abc import Collection
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.bandwidth import Seam, SetScorer
from topoalign.core.placement.gpus.topology import by_topology, compares_all
from topoalign.core.placement.preference import set_scorer

SIZES = (2, 4, 8)


class SetsLeft(NamedTuple):
    """The best free sets of one size."""

    size: int
    best: Seam
    """The strongest seam of a set of free GPUs."""
    possible: Seam
    """The strongest seam of a set of the empty machine."""
    model: str
    """Product name of the GPUs."""

    @property
    def lost(self) -> float:
        """The lost fraction of the bandwidth across the seam: 0 to 1."""
        possible = self.possible.bandwidth(self.model)
        return 1 - self.best.bandwidth(self.model) / possible if possible else 0.0


class Fragmentation(NamedTuple):
    """For each of the sizes 2, 4 and 8 that is not larger than the number of free GPUs."""

    sets: tuple[SetsLeft, ...]
    exact: bool
    """False: there are too many sets to compare, so `best` might not be the strongest."""

    @property
    def overall(self) -> float:
        """The mean loss over these sizes; 0 if there are none."""
        return sum(each.lost for each in self.sets) / len(self.sets) if self.sets else 0.0


def measure_fragmentation(topology: Topology, free: Collection[DeviceID]) -> Fragmentation:
    """The fragmentation of a machine on which these GPUs are free."""
    scorer = set_scorer(topology)
    every = range(len(scorer.scores))
    left = [place for place, gpu in enumerate(topology.gpu_by_id) if gpu in free]
    sizes = [size for size in SIZES if size <= len(left)]
    sets = tuple(
        SetsLeft(size, _best_seam(scorer, left, size), _best_seam(scorer, every, size), scorer.links.model)
        for size in sizes
    )
    return Fragmentation(sets, all(compares_all(len(every), size) for size in sizes))


def _best_seam(scorer: SetScorer, free: Collection[int], size: int) -> Seam:
    return scorer.seam(by_topology(scorer, tuple(free), (), size))
