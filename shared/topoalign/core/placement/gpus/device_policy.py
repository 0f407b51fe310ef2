"""
Defines a device policy: it chooses the GPUs of a container from those that its NUMA affinity leaves.

A policy is a module with its class, a line in PLACEMENTS and its name in `Placement`. Code elsewhere asks its methods, and
never which policy it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.bandwidth import NO_NICS, Members, Nics, SetScorer
from topoalign.core.placement.partition import best_split


class GpuChoice(NamedTuple):
    """The question to a device policy: how many GPUs of which. GPUs are named by their positions on the machine."""

    scorer: SetScorer
    """Of all GPUs of the machine."""
    available: Sequence[int]
    required: Sequence[int]
    """Some of those that are available; all of them have to be in the set."""
    size: int
    """At least 1 and as many as are required, at most as many as are available."""
    free: frozenset[int] = frozenset()
    """All GPUs that nobody holds, those that are not offered here included."""
    nics: Nics = NO_NICS
    """The NICs that the container could get with them."""


class DevicePolicy(ABC):
    """Base of the device policies: a policy without anything to explain about the sets that it did not choose."""

    @abstractmethod
    def choose(self, asked: GpuChoice) -> Members:
        """Chooses a set of `size` of the available GPUs that holds all required ones; () for no preference."""

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains what was not compared, as the end of a sentence about the chosen set; empty: all was compared."""
        return ""

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that explains why another set lost against the chosen one; empty text: no reason known."""
        return lambda other: ""


# simple: the GPUs that must be in the set, then the lowest indexes. Knows nothing of links.


class Simple(DevicePolicy):
    """The device policy simple of go-gpuallocator: takes the GPUs with the lowest indexes."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the required GPUs, and the lowest indexes of the others."""
        others = sorted({*asked.available}.difference(asked.required))
        return tuple(sorted([*asked.required, *others[: asked.size - len(asked.required)]]))


# static-dgx: fixed sets of GPUs for three machines that NVIDIA built (go-gpuallocator 876e7b7).
#
# The rule: the first set of the table that holds all required GPUs and whose members are all available; no set, no
# preference. Positions are NVML's indexes, so the tables hold only for these very machines.


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
        """Chooses the first set of the table that holds all required GPUs and is available; () if there is none."""
        for members in self.tables.get(asked.size, ()):
            if {*asked.required} <= {*members} <= {*asked.available}:
                return tuple(members)
        return ()


# best-effort: the best connected GPUs, without spoiling what is left for the next container.
#
# A node's GPUs are not equal to one another: two of them may share an NVLink, a PCIe switch, a socket or nothing but
# the machine. Taking the best set of four may break up the best pairs, so whole ways of splitting the free GPUs are
# compared.
#
# The rule (go-gpuallocator 876e7b7, bestEffort): split all free GPUs into sets of the size asked for, with what is left
# over as one smaller set, so that the scores of all sets add up to the most; all required GPUs lie in one set of full
# size. Of such a split the best set is the answer; of equals the one with the lowest indexes, so that no tie is left to
# chance. Two defects of the original are not copied: an answer with a hole in it, and a kept split that is overwritten.
#
# How it is found, and where it is not exact: `topoalign.core.placement.partition`.


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
