"""
Describes a shared GPU. Cores are hundredths of a GPU; memory is in bytes.

If a container holds the whole GPU, or if more is held than is offered, nothing is free.
"""

from topoalign.core.model.ids import DeviceID
from topoalign.core.state.share_amounts import ShareLeft


class SharedGpu(ShareLeft, frozen=True, kw_only=True):
    """One GPU that is offered in shares, with its properties, its amounts, and the held amounts."""

    device: DeviceID
    """A GPU or a MIG instance."""
    gpu: DeviceID = DeviceID("")
    """The GPU that contains the MIG instance, or the device itself. Empty: the device is a GPU."""
    index: int
    minor: int
    """The number of /dev/nvidia<minor>. It can differ from the index."""
    numa_node: int | None = None
    """None: unknown."""
    model: str = ""
    """The vendor's product name: `NVIDIA H100 80GB HBM3`. Empty: unknown."""
    mode: str = ""
    """HAMi's name for the isolation of its containers: `hami-core`, `mig` or `mps`. Empty: there is none."""
    processes: int = 0
    """Number of processes on the GPU. gpu-manager counts NVML's compute processes, topoalign the allocations."""
