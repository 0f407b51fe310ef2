"""
The files that the library reads: `vcuda.config`, what a container is limited to, and `pids.config`, which processes are its.

The first is one C struct of 8,240 bytes in the machine's byte order; strings end with a zero byte:

    pod_uid         0     48 bytes        utilization     8216  int32, hundredths of a GPU
    limit           48    int32           hard_limit      8220  int32
    occupied        52    4044 bytes      driver_version  8224  2 int32
    container_name  4096  4096 bytes      enable          8232  int32
    bus_id          8192  16 bytes        (padding)       8236
    gpu_memory      8208  uint64, bytes

- `enable` 0: a container with whole GPUs is not limited.
- `hard_limit` 1: `utilization` is the most that it gets; `limit` is read only where it is 0, and stays 0.
- A container with memory and no claim on computing time has `utilization` 100, which holds nobody back: with 0 the library
  would give it next to nothing.
- `driver_version` stays 0: the library reads the driver's version from /proc.

The second is the ids of processes as int32, ascending, because the library looks them up by bisection; it reads 1,024.

Source: vcuda-controller 72e0115, include/hijack.h and its loader; the offsets were measured with gcc on x86-64.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from topoalign.core.model.topology.offers import CORES

CONFIG = struct.Struct("=48si4044x4096s16sQ5i4x")
"""Without `occupied`, which is zero."""
CONFIG_FILE = "vcuda.config"
PIDS_FILE = "pids.config"
MOST_PROCESSES = 1_024


class Limits(NamedTuple):
    """What a container is limited to."""

    pod_uid: str
    container: str
    cores: int
    """Hundredths of a GPU's computing time; 0: it has no claim on any."""
    memory: int
    """Bytes."""
    bus_id: str = ""
    """Of its GPU, as NVML writes it: `0000:0C:00.0`. Empty: it is not known."""

    @property
    def utilization(self) -> int:
        """The field of this name."""
        return self.cores or CORES


def config_of(limits: Limits) -> bytes:
    """The content of `vcuda.config`."""
    return CONFIG.pack(
        text(limits.pod_uid, 48),
        0,
        text(limits.container, 4096),
        text(limits.bus_id, 16),
        limits.memory,
        limits.utilization,
        1,
        0,
        0,
        int(limits.cores < CORES),
    )


def owner_in(config: bytes) -> tuple[str, str] | None:
    """Pod UID and container of a `vcuda.config`; None where this is none."""
    if len(config) != CONFIG.size:
        return None
    pod_uid, _, container, *_ = CONFIG.unpack(config)
    return string_in(pod_uid), string_in(container)


def string_in(field: bytes) -> str:
    """A string of C, to its zero byte."""
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def pids_of(pids: Iterable[int]) -> bytes:
    """The content of `pids.config`: the first `MOST_PROCESSES` of these, ascending."""
    kept = sorted(pids)[:MOST_PROCESSES]
    return struct.pack(f"={len(kept)}i", *kept)


def text(value: str, size: int) -> bytes:
    """A string of C in so many bytes, its zero byte included."""
    return value.encode()[: size - 1]
