"""
best-effort: the best connected GPUs, without spoiling what is left for the next container.

A node's GPUs are not equal to one another: two of them may share an NVLink, a PCIe switch, a socket or nothing but the
machine. Taking the best set of four may break up the best pairs, so whole ways of splitting the free GPUs are compared.

The rule (go-gpuallocator 876e7b7, bestEffort): split all free GPUs into sets of the size asked for, with what is left
over as one smaller set, so that the scores of all sets add up to the most; all required GPUs lie in one set of full
size. Of such a split the best set is the answer; of equals the one with the lowest indexes, so that no tie is left to
chance. Two defects of the original are not copied: an answer with a hole in it, and a kept split that is overwritten.

How it is found, and where it is not exact: `topoalign.core.placement.partition`.
"""

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice
from topoalign.core.placement.gpus.scores import Members
from topoalign.core.placement.partition import best_split

NOTHING = frozenset[int]()


class BestEffort(DevicePolicy):
    """The device policy best-effort of go-gpuallocator: chooses the best set of the best partition."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the best set of a best partition of the available GPUs that holds all required ones."""
        question = (Placement.BEST_EFFORT, frozenset(asked.available), frozenset(asked.required), asked.size, NOTHING)
        return asked.scorer.chosen(
            question, lambda: best_split(asked.scores, asked.available, asked.required, asked.size).members
        )

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains a search that ended at its limit. It searches again: a device plugin reports only what it chose."""
        exact = best_split(asked.scores, asked.available, asked.required, asked.size).exact
        return "" if exact else ", greedy: the exact search ended at its limit on work"
