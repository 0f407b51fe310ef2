"""
Defines the interface of device policies, which choose a container's GPUs from those that its NUMA affinity allows.

A policy is a class, a line in PLACEMENTS and a name in `Placement`. Other code uses its methods, never its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.bandwidth import NO_NICS, Members, Nics, SetScorer
from topoalign.core.placement.partition import best_split


class GpuChoice(NamedTuple):
    """The input of a device policy. GPUs are identified by their positions on the machine."""

    scorer: SetScorer
    """The scorer of the machine's GPUs."""
    available: Sequence[int]
    required: Sequence[int]
    """Available GPUs that must be in the set."""
    size: int
    """The number of GPUs to choose: at least 1 and len(required), at most len(available)."""
    free: frozenset[int] = frozenset()
    """All GPUs that no container holds, including those that are not available for this choice."""
    nics: Nics = NO_NICS
    """The NICs that the container could get with them."""


class DevicePolicy(ABC):
    """Base class of device policies. By default, a policy explains nothing about the sets that it did not choose."""

    @abstractmethod
    def choose(self, asked: GpuChoice) -> Members:
        """Chooses a set of `size` available GPUs that has all required ones. (): no preference."""

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains which sets were not compared, as the end of a sentence about the chosen set. Empty: all were."""
        return ""

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that explains why another set lost against the chosen one. Empty text: unknown."""
        return lambda other: ""


# simple: the GPUs that must be in the set, then the lowest indexes. Links do not count.


class Simple(DevicePolicy):
    """The device policy simple of go-gpuallocator: takes the GPUs with the lowest indexes."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the required GPUs, and the lowest indexes of the others."""
        others = sorted({*asked.available}.difference(asked.required))
        return tuple(sorted([*asked.required, *others[: asked.size - len(asked.required)]]))


# static-dgx: fixed sets of GPUs for three machines that NVIDIA built (go-gpuallocator 876e7b7).
#
# The rule: the first set of the table that has all required GPUs and whose members are all available. Without such a
# set, there is no preference. Positions are NVML's indexes, so the tables are valid only for these machines.


Tables = Mapping[int, Sequence[Sequence[int]]]
"""Size -> the sets of that size, the first preferred."""


EIGHT: Tables = {1: [(gpu,) for gpu in range(8)], 4: ((0, 1, 2, 3), (4, 5, 6, 7)), 8: (range(8),)}
DGX1_PASCAL: Tables = {**EIGHT, 2: ((0, 2), (1, 3), (4, 6), (5, 7))}
DGX1_VOLTA: Tables = {**EIGHT, 2: ((0, 3), (1, 2), (4, 7), (5, 6))}
DGX2: Tables = {size: [range(first, first + size) for first in range(0, 16, size)] for size in (1, 2, 4, 8, 16)}


class StaticSets(DevicePolicy):
    """The static device policies of go-gpuallocator: each chooses from one table of sets."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the first available set of the table that has all required GPUs; () if there is none."""
        for members in self.tables.get(asked.size, ()):
            if {*asked.required} <= {*members} <= {*asked.available}:
                return tuple(members)
        return ()


# best-effort: well connected GPUs, such that the next container can get well connected GPUs, too.
#
# The pairs of a node's GPUs differ: they can be connected by NVLinks, or share a PCIe switch or a socket, or only the
# machine. The best set of four can split the best pairs. So complete partitions of the free GPUs are compared.
#
# The rule (go-gpuallocator 876e7b7, bestEffort): of all partitions of the free GPUs into sets of the requested size,
# and one smaller set of the remaining GPUs, use the one with the highest sum of the scores of its sets. All required
# GPUs are in one set of full size. The answer is the best set of this partition. Of equal sets, it is the one with the
# lowest indexes, so that the answer is deterministic. Two defects of the original are not repeated: an answer in which
# a GPU is missing, and a best partition that is overwritten.
#
# `topoalign.core.placement.partition` describes the search, and when it is not exact.


NOTHING = frozenset[int]()


class BestEffort(DevicePolicy):
    """The device policy best-effort of go-gpuallocator: chooses the best set of the best partition."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the best set of a best partition of the available GPUs that holds all required ones."""
        question = (Placement.BEST_EFFORT, frozenset(asked.available), frozenset(asked.required), asked.size, NOTHING)
        return asked.scorer.chosen(
            question, lambda: best_split(asked.scorer.scores, asked.available, asked.required, asked.size).members
        )

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains a choice among too many GPUs to compare all partitions."""
        exact = best_split(asked.scorer.scores, asked.available, asked.required, asked.size).exact
        return "" if exact else ", greedy: too many GPUs to compare all partitions"
