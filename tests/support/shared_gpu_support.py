"""GPUs that are shared, by few words; levels of the GPU tree as NVML reports them, by chance."""

from typing import Any

from hypothesis import strategies as st

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.sharing.shared_gpus import SharedGpu

BLOCK = 2**28
LEVELS = (10, 20, 30, 40, 50)
Levels = list[list[int]]


@st.composite
def hierarchies(draw: st.DrawFn, most: int = 8) -> Levels:
    """Levels of cards that are grouped, groups of which are grouped again, and so on, each time on a higher level."""
    count = draw(st.integers(1, most))
    levels = [[0] * count for _ in range(count)]
    groups = [[card] for card in draw(st.permutations(range(count)))]
    for level in LEVELS:
        joined: list[list[int]] = []
        for group in groups:
            if joined and draw(st.booleans()) | (level == LEVELS[-1]):
                for a in joined[-1]:
                    for b in group:
                        levels[a][b] = levels[b][a] = level
                joined[-1] = joined[-1] + group
            else:
                joined.append(group)
        groups = joined
    return levels


def shared_gpu(
    index: int, memory: int, cores_held: int = 0, memory_held: int = 0, *, minor: int | None = None, **more: Any
) -> SharedGpu:
    """GPU-<index> with 100 cores and so many bytes, of which so much is held, by somebody if anything is."""
    return SharedGpu(
        device=DeviceID(f"GPU-{index}"),
        index=index,
        minor=index if minor is None else minor,
        offered=Amount(cores=100, memory=memory),
        held=Amount(cores=cores_held, memory=memory_held),
        **{"sharers": int(cores_held > 0 or memory_held > 0), **more},
    )
