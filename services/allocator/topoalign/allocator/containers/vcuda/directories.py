"""
The directories that containers see at /etc/vcuda: one for each allocation of units, below one root that is ours alone.

A directory is named after what was allocated, by a digest of the resource and the ids: not after the pod, which Allocate
does not tell, nor after a record, which is another one where the journal was lost. So the mount that the kubelet keeps, and
gives a container again whenever that starts, always finds it.

    <root>/units-2f1c…          of this process' user, mode 0755, mounted read-only
        vcuda.config            whose it is and what that is limited to; written before the container starts
        pids.config             processes of the container, since one of them has registered
        vcuda.sock
        <container id>/         the two files once more, where the library looks if there is no vcuda.config above

The same units may be another container's later. Its directory is made anew then: should the former container still run, what
it has mounted is empty from then on, and the library ends its processes, as it opens `pids.config` again and again (source:
vcuda-controller 72e0115, src/hijack_call.c).

The root is closed to other users of the host (mode 0700): control groups and mounts tell which container calls, and a user
to whom the host leaves a control group may give it and its mounts the names of one.

Files are replaced as a whole, and only directories with such a name that belong to this process' user are touched. What a
process that was killed leaves (a draft, a directory that is being removed) is removed.

A container may write in its directory where its mount is not read-only. So nothing there is opened but files and
directories, and no link is followed. A directory that goes loses its name at once, and what is in it in short steps: a
pipe, a deep tree or a million files neither keep the agent busy nor keep the units from the next container.
"""

import os
import re
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import (
    MODE,
    digest_of,
    discard,
    entries,
    is_directory,
    is_socket,
    make_root,
    opened,
    put_aside,
    read_file,
    remove_tree,
    write_file,
)
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES

# The files that the library reads: `vcuda.config`, what a container is limited to, and `pids.config`, which processes
# are its.
#
# The first is one C struct of 8,240 bytes in the machine's byte order; strings end with a zero byte:
#
#     pod_uid         0     48 bytes        utilization     8216  int32, hundredths of a GPU
#     limit           48    int32           hard_limit      8220  int32
#     occupied        52    4044 bytes      driver_version  8224  2 int32
#     container_name  4096  4096 bytes      enable          8232  int32
#     bus_id          8192  16 bytes        (padding)       8236
#     gpu_memory      8208  uint64, bytes
#
# - `enable` 0: a container with whole GPUs is not limited.
# - `hard_limit` 1: `utilization` is the most that it gets; `limit` is read only where it is 0, and stays 0.
# - A container with memory and no claim on computing time has `utilization` 100, which holds nobody back: with 0 the
#   library would give it next to nothing.
# - `driver_version` stays 0: the library reads the driver's version from /proc.
#
# The second is the ids of processes as int32, ascending, because the library looks them up by bisection; it reads
# 1,024.
#
# Source: vcuda-controller 72e0115, include/hijack.h and its loader; the offsets were measured with gcc on x86-64.


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


SOCKET = "vcuda.sock"
NAME = re.compile(r"units-[0-9a-f]{32}")
MOST_KEPT = 64
"""Entries of a directory that is used again: the agent makes four, and a draft."""


def name_of(resource: ResourceName, units: Collection[DeviceID]) -> str:
    """The name of the directory of these units, in whatever order they are."""
    return f"units-{digest_of(resource, units)}"


def listed(root: Path) -> list[str]:
    """The names of the directories below the root that are ours; none where there is no root. Raises OSError."""
    return limiter_files.listed(root, NAME)


def config_in(root: Path, name: str) -> bytes:
    """The `vcuda.config` of a directory; empty where there is none."""
    try:
        with opened(root) as at, opened(name, at) as directory:
            return read_file(directory, CONFIG_FILE)
    except OSError:
        return b""


def owner_of(root: Path, name: str) -> tuple[str, str] | None:
    """Pod UID and container whose directory this is; None where it is nobody's yet."""
    return owner_in(config_in(root, name))


def prepare(root: Path, name: str, limits: Limits) -> None:
    """
    Has the directory in place for a container with these limits that is about to start. What a former container of that name
    registered goes; the directory of another one is made anew. Raises OSError; then no half file is there, and it can be
    repeated.
    """
    make_root(root)
    with opened(root) as at:
        if owner_of(root, name) != (limits.pod_uid, limits.container) or is_crowded(at, name):
            if gone := discard(at, name):
                with suppress(OSError):  # its former container, if that runs still, finds it empty at once
                    remove_tree(at, gone)
            os.mkdir(name, MODE, dir_fd=at)
        with opened(name, at) as directory:
            os.fchmod(directory, MODE)
            for each in entries(directory):
                if is_directory(directory, each):
                    put_aside(directory, each, at)
                elif each != CONFIG_FILE and not (each == SOCKET and is_socket(directory, each)):
                    os.unlink(each, dir_fd=directory)
            if read_file(directory, CONFIG_FILE) != (config := config_of(limits)):
                write_file(directory, CONFIG_FILE, config, durable=True)


def write_registered(root: Path, name: str, container_id: str, files: dict[str, bytes], pids: str) -> None:
    """
    Writes the files of a container that has registered into the directory of its id, and that called `pids` beside it: where
    they are that already, nothing. Raises OSError, also where the directory is not there any more.
    """
    with opened(root) as at, opened(name, at) as directory:
        with suppress(FileExistsError):
            os.mkdir(container_id, MODE, dir_fd=directory)
        with opened(container_id, directory) as own:
            os.fchmod(own, MODE)
            for file, content in files.items():
                if read_file(own, file) != content:
                    write_file(own, file, content)
        if read_file(directory, pids) != files[pids]:
            write_file(directory, pids, files[pids])


def is_crowded(at: int, name: str) -> bool:
    """Whether a directory has more in it than `MOST_KEPT`. Raises OSError where there is none."""
    with opened(name, at) as directory:
        return len(entries(directory, MOST_KEPT + 1)) > MOST_KEPT
