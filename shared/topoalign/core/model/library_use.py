"""
What the library that limits containers (HAMi-core) counts of GPUs, as the files say that it shares between the processes of
a container.

The container writes these files, so they are no authority: it may say what it likes of itself. What the driver measures is
in `model.processes`. Nothing is stored, as of a measurement.
"""

import msgspec

from topoalign.core.model.ids import AllocationID, DeviceID, NodeName


class LibraryCount(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the library counts of one GPU for all processes of a container."""

    device: DeviceID
    """The GPU."""
    memory: int
    """Bytes in all, by which it limits."""
    context: int | None = None
    """Bytes of CUDA contexts. None, here and below: the file does not tell, or says more than all."""
    modules: int | None = None
    """Bytes of loaded programs."""
    buffers: int | None = None
    """Bytes that the programs have allocated."""
    utilization: int | None = None
    """Percent of the last second in which kernels ran, in all, as the library was told by NVML."""
    last_kernel: int | None = None
    """Wall seconds of the newest kernel on any GPU of the container, or of the start of its newest process."""


class LibraryUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the file of one container says."""

    allocation: AllocationID
    counts: tuple[LibraryCount, ...] = ()
    """Of those of its GPUs that the file names, in the order of the file."""
    failure: str = ""
    """Why the file cannot be used."""


class LibraryReading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of all containers of a node that have one."""

    node: NodeName
    containers: tuple[LibraryUse, ...] = ()
    finding: str = ""
    """Why none could be read."""
    left_out: int = 0
    """Containers that are not listed because there are too many."""
