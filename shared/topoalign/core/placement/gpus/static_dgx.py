"""
static-dgx: fixed sets of GPUs for three machines that NVIDIA built (go-gpuallocator 876e7b7).

The rule: the first set of the table that holds all required GPUs and whose members are all available; no set, no
preference. Positions are NVML's indexes, so the tables hold only for these very machines.
"""

from collections.abc import Collection, Mapping, Sequence

from topoalign.core.placement.gpus.scores import Scores

Tables = Mapping[int, Sequence[Sequence[int]]]
"""Size -> the sets of that size, the first preferred."""

QUADS_OF_EIGHT = ((0, 1, 2, 3), (4, 5, 6, 7))

DGX1_PASCAL: Tables = {
    1: [(gpu,) for gpu in range(8)],
    2: ((0, 2), (1, 3), (4, 6), (5, 7)),
    4: QUADS_OF_EIGHT,
    8: (range(8),),
}
DGX1_VOLTA: Tables = {
    1: [(gpu,) for gpu in range(8)],
    2: ((0, 3), (1, 2), (4, 7), (5, 6)),
    4: QUADS_OF_EIGHT,
    8: (range(8),),
}
DGX2: Tables = {size: [range(first, first + size) for first in range(0, 16, size)] for size in (1, 2, 4, 8, 16)}


class StaticSets:
    """A device policy made of one table: chooses the first set that holds all required GPUs and is available, or ()."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def __call__(
        self, scores: Scores, available: Sequence[int], required: Collection[int], size: int
    ) -> tuple[int, ...]:
        for members in self.tables.get(size, ()):
            if {*required} <= {*members} <= {*available}:
                return tuple(members)
        return ()
