"""
static-dgx: fixed sets of GPUs for three machines that NVIDIA built (go-gpuallocator 876e7b7).

The rule: the first set of the table that holds all required GPUs and whose members are all available; no set, no
preference. Positions are NVML's indexes, so the tables hold only for these very machines.
"""

from collections.abc import Mapping, Sequence

from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice
from topoalign.core.placement.gpus.scores import Members

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
