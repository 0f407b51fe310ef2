"""
Measurements of GPUs at one moment: their memory, their time, and the processes that use them.

A measurement is not a fact: nothing stores it, and the next one may differ.
"""

from typing import Literal

import msgspec

from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, NodeName

ProcessKind = Literal["compute", "graphics", "mps"]
"""Which of the driver's lists a process is in: it computes, it draws, it computes through an MPS server."""


class ProcessIdentity(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Where a process runs and what it is called. Empty fields: not known, or, of a process in no pod, there is none."""

    pod_uid: str = ""
    """UID of its pod, as the kubelet's checkpoint has it: of a static pod 32 hex digits."""
    container_id: str = ""
    """Id that the container runtime has given to its container."""
    container: ContainerName = ContainerName("")
    """Read from the mounts of the container. A container that may mount can change it, so it is no proof."""
    cgroup: str = ""
    """Path of its control group, where that is none of a pod: `/system.slice/docker-….scope`."""
    command: str = ""
    """Name of its program, at most 15 bytes."""


class GpuProcess(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A process that has a GPU, or a MIG instance of one, open for work."""

    pid: int
    """Its id in the node's first PID namespace."""
    kinds: tuple[ProcessKind, ...]
    """In the order of `ProcessKind`; one process may be in several lists."""
    memory: int | None = None
    """Bytes of the GPU's memory. None: the driver does not report it."""
    utilization: int | None = None
    """Percent of the last second in which its kernels ran. None: not reported, as with MIG instances."""
    identity: ProcessIdentity | None = None
    """Where it runs. None: it has ended meanwhile, or the processes of the node cannot be seen."""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of a GPU or of a MIG instance. The processes of a GPU with instances are those of its instances."""

    device: DeviceID
    memory: int | None = None
    """Bytes in all. None, here and below: the driver does not report it."""
    memory_used: int | None = None
    """Bytes in use, what the driver itself needs among them: more than all processes have."""
    utilization: int | None = None
    """Percent of the last sampling period, up to a second, in which any kernel ran."""
    memory_utilization: int | None = None
    """Percent of the same period in which its memory was read or written."""
    processes: tuple[GpuProcess, ...] | None = None
    """Ascending by pid."""
    failure: str = ""
    """Why the device could not be asked; then nothing is known of its use."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of a node's GPUs at one moment."""

    node: NodeName
    time: float
    """When it was measured: wall seconds."""
    devices: tuple[DeviceUse, ...]
    """GPUs in the order of the driver, each followed by its MIG instances. One that does not report its id is missing."""
    finding: str = ""
    """Why it is not known where processes run; empty: it is."""
    left_out: int = 0
    """Processes that are not listed because there are too many: those with the least memory."""


# What the library that limits containers (HAMi-core) counts of GPUs, as read from the files that it shares between
# the processes of a container.
#
# The container writes these files, so they are not reliable: it may write anything about itself. What the driver
# measures is in `model.processes`. Nothing is stored, as of a measurement.


class LibraryCount(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the library counts of one GPU for all processes of a container."""

    device: DeviceID
    """The GPU."""
    memory: int
    """Bytes in all, by which it limits."""
    context: int | None = None
    """Bytes of CUDA contexts. None, here and below: the file does not contain it, or contains more than the total."""
    modules: int | None = None
    """Bytes of loaded programs."""
    buffers: int | None = None
    """Bytes that the programs have allocated."""
    utilization: int | None = None
    """Percent of the last second in which kernels ran, in all, as NVML reported to the library."""
    last_kernel: int | None = None
    """Wall seconds of the newest kernel on any GPU of the container, or of the start of its newest process."""


class LibraryUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of the file of one container."""

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
