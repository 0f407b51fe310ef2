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

from collections.abc import Collection, Sequence

from topoalign.core.placement.gpus.scores import Scores
from topoalign.core.placement.partition import best_split


def best_effort(scores: Scores, available: Sequence[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """Chooses `size` of the available positions, ascending, that hold all required ones: a set of the best split."""
    return best_split(scores, available, required, size).members
