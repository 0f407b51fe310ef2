"""How much what is free has suffered: the best sets of GPUs that can still be had, against the best there could be."""

from collections.abc import Collection
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.set_scorer import SIZES, SetScorer
from topoalign.core.placement.partition import best_sets
from topoalign.core.placement.preference import set_scorer


class SetsLeft(NamedTuple):
    """Sets of one size."""

    size: int
    best: int
    """Link score of the best set that is still free."""
    possible: int
    """Of the best set of the machine: what could be free if other GPUs were held."""

    @property
    def lost(self) -> float:
        """0: as good as can be; 1: worth nothing."""
        return 1 - self.best / self.possible if self.possible else 0.0


class Fragmentation(NamedTuple):
    """For each size of 2, 4 and 8 of which so many GPUs are free."""

    sets: tuple[SetsLeft, ...]
    exact: bool
    """False: with more than 18 GPUs of no regular shape, good sets stand for the best."""

    @property
    def overall(self) -> float:
        """The mean over these sizes; 0 where no set is left to be judged."""
        return sum(each.lost for each in self.sets) / len(self.sets) if self.sets else 0.0


def fragmentation(topology: Topology, free: Collection[DeviceID]) -> Fragmentation:
    """Of a machine on which these GPUs are free."""
    return sets_left(set_scorer(topology), [place for place, gpu in enumerate(topology.gpu_by_id) if gpu in free])


def sets_left(possible: SetScorer, free: Collection[int]) -> Fragmentation:
    """Of a machine with this scorer, of whose GPUs those at these positions are free."""
    best, exact = best_sets(possible.scores, free)
    sets = tuple(SetsLeft(size, best[size], possible.best[size]) for size in SIZES if size <= len(free))
    return Fragmentation(sets, exact and possible.exact)
