"""
Measurements of GPUs at one point in time: the use of their memory and computing time, and the processes that use them.

A measurement is not a fact: nothing stores it, and the next one may differ.
"""

from typing import Literal

import msgspec

from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, NodeName

ProcessKind = Literal["compute", "graphics", "mps"]
"""The driver's list that contains the process: compute processes, graphics processes, or clients of an MPS server."""


class ProcessIdentity(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Where a process runs, and its name. An empty field is unknown, or does not apply to a process without a pod."""

    pod_uid: str = ""
    """UID of its pod as in the kubelet's checkpoint. For a static pod: 32 hex digits."""
    container_id: str = ""
    """Id that the container runtime has given to its container."""
    container: ContainerName = ContainerName("")
    """Read from the mounts of the container. It is not reliable, because a container that may mount can change it."""
    cgroup: str = ""
    """Path of its control group (cgroup) if it is in no pod: `/system.slice/docker-….scope`."""
    command: str = ""
    """Name of its program, at most 15 bytes."""


class GpuProcess(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A process that uses a GPU or a MIG instance."""

    pid: int
    """Its id in the node's initial PID namespace."""
    kinds: tuple[ProcessKind, ...]
    """In the order of `ProcessKind`; one process may be in several lists."""
    memory: int | None = None
    """Bytes of the GPU's memory. None: the driver does not report it."""
    utilization: int | None = None
    """Percent of the last second in which its kernels ran. None: not reported, as with MIG instances."""
    identity: ProcessIdentity | None = None
    """Where it runs. None: it has ended, or the node's processes are not visible."""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of a GPU or of a MIG instance. The processes of a GPU with instances are those of its instances."""

    device: DeviceID
    memory: int | None = None
    """Bytes in total. None, here and below: the driver does not report it."""
    memory_used: int | None = None
    """Bytes in use. More than the sum of all processes, because the driver itself needs some."""
    utilization: int | None = None
    """Percent of the last sampling period, up to a second, in which any kernel ran."""
    memory_utilization: int | None = None
    """Percent of the same period in which its memory was read or written."""
    processes: tuple[GpuProcess, ...] | None = None
    """Ascending by pid."""
    failure: str = ""
    """Why the device could not be measured. Then the other fields are empty."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of a node's GPUs at one point in time."""

    node: NodeName
    time: float
    """When it was measured, in seconds since 1970."""
    devices: tuple[DeviceUse, ...]
    """GPUs in the order of the driver, each followed by its MIG instances. Devices that report no id are missing."""
    finding: str = ""
    """Why it is unknown where processes run. Empty: it is known."""
    left_out: int = 0
    """Number of processes that are not listed because there are too many. They use the least memory."""


# Use of GPUs as counted by the library that limits containers (HAMi-core). The processes of a container share a file
# for these counts. The container can write anything into this file, so the counts are not reliable.


class LibraryCount(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The library's counts for one GPU and all processes of a container."""

    device: DeviceID
    """The GPU."""
    memory: int
    """Bytes in total. The library compares them with the limit."""
    context: int | None = None
    """Bytes of CUDA contexts. None, here and below: the file does not contain it, or contains more than the total."""
    modules: int | None = None
    """Bytes of loaded programs."""
    buffers: int | None = None
    """Bytes that the programs have allocated."""
    utilization: int | None = None
    """Percent of the last second in which any CUDA kernel ran, as NVML reported to the library."""
    last_kernel: int | None = None
    """Seconds from 1970 to the container's newest CUDA kernel on any GPU, or to the start of its newest process."""


class LibraryUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of the file of one container."""

    allocation: AllocationID
    counts: tuple[LibraryCount, ...] = ()
    """The counts of the GPUs in the file, in its order."""
    failure: str = ""
    """Why the file cannot be used."""


class LibraryReading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of all containers of a node that have one."""

    node: NodeName
    containers: tuple[LibraryUse, ...] = ()
    finding: str = ""
    """Why none could be read."""
