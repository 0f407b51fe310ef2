"""
Manages the directories at /etc/vcuda in containers, one per allocation of units, and adds them to Allocate responses.

The name of a directory is a digest of the resource and the devices: Allocate does not name the pod, and the kubelet
uses the same mount each time a container starts.

    <root>/units-2f1c…          of this process' user, mode 0755, mounted read-only
        vcuda.config            owner and limits; written before the container starts
        pids.config             ids of the container's processes; written when the first one registers
        vcuda.sock
        <container id>/         copies of the two files, which the library reads if there is no vcuda.config above

The directory is created again each time a container starts. A former container that still runs finds its mount empty,
and the library ends its processes (vcuda-controller 72e0115, src/hijack_call.c). Other users cannot access the root
(mode 0700): callers are identified by their cgroups and mounts, and a host user could imitate a container's.
"""

import os
import re
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import (
    MODE,
    digest_of,
    discard,
    make_root,
    open_directory,
    read_file,
    remove_tree,
)
from topoalign.allocator.containers.responses import ContainerDevices, EditProvider
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.kubelet.control_groups import HIERARCHIES, PROCESSES, sees_all_processes
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Flags
from topoalign.runtime.whole_files import replace_file

# The files that the library reads: `vcuda.config` contains the limits of a container, `pids.config` the ids of its
# processes.
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
# - `hard_limit` 1: `utilization` is the maximum. The library reads `limit` only if `hard_limit` is 0, so it stays 0.
# - A container with memory but without computing time has `utilization` 100, which means no limit. With 0 the library
#   would give it almost no computing time.
# - `driver_version` stays 0: the library reads the driver's version from /proc.
#
# The second file contains process ids as int32 in ascending order, because the library uses binary search. It reads at
# most 1,024.
#
# Source: vcuda-controller 72e0115, include/hijack.h and its loader; the offsets were measured with gcc on x86-64.


CONFIG = struct.Struct("=48si4044x4096s16sQ5i4x")
"""Without `occupied`, which is zero."""
CONFIG_FILE = "vcuda.config"
PIDS_FILE = "pids.config"
MOST_PROCESSES = 1_024


class Limits(NamedTuple):
    """The limits of a container."""

    pod_uid: str
    container: str
    cores: int
    """Hundredths of a GPU's computing time; 0: it requests none."""
    memory: int
    """Bytes."""
    bus_id: str = ""
    """PCI address of its GPU in NVML's form: `0000:0C:00.0`. Empty: unknown."""


def encode_config(limits: Limits) -> bytes:
    """Encodes `vcuda.config`."""
    return CONFIG.pack(
        c_string(limits.pod_uid, 48),
        0,
        c_string(limits.container, 4096),
        c_string(limits.bus_id, 16),
        limits.memory,
        limits.cores or CORES,
        1,
        0,
        0,
        int(limits.cores < CORES),
    )


def pids_of(pids: Iterable[int]) -> bytes:
    """Encodes `pids.config`: the lowest `MOST_PROCESSES` of these process ids, in ascending order."""
    kept = sorted(pids)[:MOST_PROCESSES]
    return struct.pack(f"={len(kept)}i", *kept)


def c_string(value: str, size: int) -> bytes:
    """Encodes a C string for a field of `size` bytes, including its zero byte."""
    return value.encode()[: size - 1]


def text_of(field: bytes) -> str:
    """Decodes a C string up to its zero byte."""
    return field.partition(b"\0")[0].decode("utf-8", "replace")


SOCKET = "vcuda.sock"
NAME = re.compile(r"units-[0-9a-f]{32}")


def units_directory_name(resource: ResourceName, units: Collection[DeviceID]) -> str:
    """Returns the directory name of these units, in any order."""
    return f"units-{digest_of(resource, frozenset(units))}"


def read_config_owner(root: Path, name: str) -> tuple[str, str] | None:
    """Reads pod UID and container of a directory's owner; None if it has none yet, or an invalid `vcuda.config`."""
    try:
        with open_directory(root) as at, open_directory(name, at) as directory:
            config = read_file(directory, CONFIG_FILE)
    except OSError:
        return None
    if len(config) != CONFIG.size:
        return None
    pod_uid, _, container, *_ = CONFIG.unpack(config)
    return text_of(pod_uid), text_of(container)


def prepare_units_directory(root: Path, name: str, limits: Limits) -> None:
    """Creates a container's directory before it starts, in place of a former one. Can be repeated after OSError."""
    make_root(root)
    with open_directory(root) as at:
        if gone := discard(at, name):
            with suppress(OSError):  # a former container that still runs sees an empty directory at once
                remove_tree(at, gone)
        os.mkdir(name, MODE, dir_fd=at)
        with open_directory(name, at) as directory:
            os.fchmod(directory, MODE)
            replace_file(CONFIG_FILE, encode_config(limits), durable=True, directory=directory)


def write_registered(root: Path, name: str, container_id: str, pids: bytes) -> None:
    """Writes `pids.config`, and both files in the directory `container_id`, if they have changed. Raises OSError."""
    with open_directory(root) as at, open_directory(name, at) as directory:
        files = {CONFIG_FILE: read_file(directory, CONFIG_FILE), PIDS_FILE: pids}
        with suppress(FileExistsError):
            os.mkdir(container_id, MODE, dir_fd=directory)
        with open_directory(container_id, directory) as own:
            os.fchmod(own, MODE)
            for file, content in files.items():
                if read_file(own, file) != content:
                    replace_file(file, content, directory=own)
        if read_file(directory, PIDS_FILE) != pids:
            replace_file(PIDS_FILE, pids, directory=directory)


# The edits of a container in Allocate responses. Computing time and memory have separate responses, and if both mount
# at one path, the kubelet keeps only one mount. Either directory works, because both have the same content before the
# container starts (`limiter`).


CONTAINER_DIRECTORY = "/etc/vcuda"
CONTAINER_LIBRARIES = "/usr/local/nvidia"
LIBRARY_PATH = "LD_LIBRARY_PATH"


class VcudaEdits(EditProvider, frozen=True):
    """Adds the limiter's mounts and variables for one resource to Allocate responses."""

    root: str
    """`flags.vcudaRoot`, on the host."""
    libraries: str
    """`flags.vcudaLibraries`, on the host; empty: containers get the library in another way."""

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds the mounts for a container with these units, and the path of its libraries."""
        units = devices.allocation.from_kubelet[devices.resource]
        response.mounts.append(
            v1beta1.Mount(
                container_path=CONTAINER_DIRECTORY,
                host_path=f"{self.root}/{units_directory_name(devices.resource, units)}",
                read_only=True,
            )
        )
        if self.libraries:
            response.envs[LIBRARY_PATH] = f"{CONTAINER_LIBRARIES}/lib64"
            response.mounts.append(
                v1beta1.Mount(container_path=CONTAINER_LIBRARIES, host_path=self.libraries, read_only=True)
            )


def vcuda_edits(flags: Flags, proc: Path, cgroups: Path) -> VcudaEdits:
    """Returns the current edits of the limiter. Raises ContainerUnready if no container could be limited."""
    if not flags.vcuda_root:
        finding = "the limiter vcuda has no directory (flags.vcudaRoot)"
        raise ContainerUnready(finding, "give discovery and allocator the same configuration file")
    if not sees_all_processes(proc):
        finding = "the limiter vcuda cannot identify callers: the agent does not see the node's processes"
        raise ContainerUnready(finding, "run the agent in the host's PID namespace (hostPID)")
    if not any(is_root(cgroups / each) for each in HIERARCHIES):
        finding = f"the limiter vcuda does not find the host's control groups at {cgroups}"
        raise ContainerUnready(finding, "mount the host's /sys/fs/cgroup there")
    try:
        make_root(Path(flags.vcuda_root))
    except OSError as error:
        finding = f"the limiter vcuda cannot create its directory: {error.strerror}"
        remedy = "check that flags.vcudaRoot is a directory on the host and that the agent can write to it"
        raise ContainerUnready(finding, remedy) from error
    return VcudaEdits(flags.vcuda_root.rstrip("/"), flags.vcuda_libraries)


def is_root(hierarchy: Path) -> bool:
    """Whether this is the root of the host's cgroup hierarchy, not that of a container; always True for cgroup v1."""
    # In version 2 the root is the only group without events ("Control Group v2" of the kernel's documentation).
    return os.path.isfile(hierarchy / PROCESSES) and not os.path.exists(hierarchy / "cgroup.events")
