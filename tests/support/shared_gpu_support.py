"""GPUs that are shared, by few words."""

from typing import Any

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.sharing.shared_gpus import SharedGpu


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
