"""
Finds files on the host: the driver's libraries and device nodes.

The driver can be installed on the host or by a container, and this process can also run in a container. So a path has
two roots: the kubelet gets the path on the host, and this process checks the path at which it sees the file.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Flags, Imex


class ContainerUnready(Unavailable):
    """
    Raised if a container would lack device nodes, driver files or hooks.

    Remedy: Correct on the node what the message names.
    """


class HostRoot(NamedTuple):
    """A root directory on the host, and where this process sees it. Paths below it are given as if it were `/`."""

    host: str
    here: Path

    def on_host(self, path: str) -> str:
        """Returns the host path for this absolute path below the root."""
        return os.path.join(self.host, path.lstrip("/"))

    def below(self, path: str) -> Path:
        """Returns the path at which this process sees this path."""
        return self.here / path.lstrip("/")

    def has(self, path: str) -> bool:
        """Whether this process sees a file at this path; False for a mount that fails."""
        return os.path.exists(self.below(path))


def driver_root(flags: Flags) -> HostRoot:
    """The root of the driver's libraries: `nvidiaDriverRoot`, seen at `containerDriverRoot` if that exists."""
    mounted = Path(flags.plugin.container_driver_root)
    return HostRoot(flags.nvidia_driver_root, mounted if os.path.isdir(mounted) else Path(flags.nvidia_driver_root))


def dev_root(flags: Flags) -> HostRoot:
    """
    Returns the root of /dev/nvidia*: `nvidiaDevRoot`, or else the driver's root. If this process sees no /dev there, it
    uses its own /dev, which is the host's in a privileged container (k8s-device-plugin v0.20.0, root.getDevRoot).
    """
    host = flags.nvidia_dev_root or flags.nvidia_driver_root
    places = [Path(host), Path("/")]
    if host == flags.nvidia_driver_root:
        places.insert(0, Path(flags.plugin.container_driver_root))
    return HostRoot(host, next((place for place in places if os.path.isdir(place / "dev")), Path("/")))


# In addition to device nodes a container needs the driver's user-space libraries, in the version of the kernel module.
#
# They are found in the same way as by NVIDIA's tools: in the directory that contains a file `libcuda.so.<version>`, all
# files whose names end with that version. Only regular files count. A symbolic link could point to a path in another
# root, and the directory that it points to is searched anyway.
#
# Sources: nvidia-container-toolkit v1.17 (pkg/nvcdi), the part for the capabilities compute and utility.


LIBRARIES = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
)
"""Directories in which distributions install the libraries."""

PROGRAMS = (
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-debugdump",
    "/usr/bin/nvidia-cuda-mps-control",
    "/usr/bin/nvidia-cuda-mps-server",
)

_CUDA = re.compile(r"libcuda\.so\.(\d+(?:\.\d+){1,2})")


class DriverFiles(NamedTuple):
    """The driver's user-space files, as paths below the driver's root. They have the same paths in a container."""

    directory: str
    """The directory of the libraries."""
    libraries: tuple[str, ...]
    programs: tuple[str, ...]


def find_driver_files(root: HostRoot) -> DriverFiles:
    """Finds the files of the one driver below the root. Raises ContainerUnready if there is none, or more than one."""
    for directory in LIBRARIES:
        here = root.below(directory)
        # A host has thousands of files there, so only those of the driver are checked individually.
        names = list[str]()
        with suppress(OSError):
            names = sorted(os.listdir(here))
        versions = [named[1] for name in names if (named := _CUDA.fullmatch(name)) and is_regular(here / name)]
        if len(versions) > 1:
            raise ContainerUnready(
                f"{root.on_host(directory)} has libraries of drivers {' and '.join(versions)}",
                "remove those of the driver that is not loaded",
            )
        if versions:
            ending = f".so.{versions[0]}"
            return DriverFiles(
                directory,
                tuple(f"{directory}/{name}" for name in names if name.endswith(ending) and is_regular(here / name)),
                tuple(path for path in PROGRAMS if is_regular(root.below(path))),
            )
    raise ContainerUnready(
        f"no libcuda.so.<version> is found below {root.here}, so that a CDI specification would give containers no driver",
        "mount the driver's root into this container at containerDriverRoot, or use deviceListStrategy envvar",
    )


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file; symbolic links do not count."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


# Device nodes of GPUs and MIG instances, and the nodes that they share.
#
# A GPU has the node /dev/nvidia<minor>, and its minor is not always its index. A MIG instance has its GPU's node and
# two capability nodes, one for the GPU instance and one for the compute instance. The driver lists the minors of these
# in a file in /proc. None of them can be used without the nodes that all processes share.
#
# Sources: k8s-device-plugin v0.20.0 (internal/plugin, internal/rm, internal/mig, internal/imex).


SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""The device nodes that every container with a GPU gets, if they exist."""

MINORS = "driver/nvidia-caps/mig-minors"
_MINOR = re.compile(r"gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)")
MOST_MINORS = 1 << 20
"""Maximum number of bytes that are read from that file. It has at most about ten thousand lines."""

Instance = tuple[int, int, int | None]
"""GPU minor, GPU instance, compute instance; None for the GPU instance itself."""


def present(root: HostRoot, paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths that exist below the root."""
    return tuple(path for path in paths if root.has(path))


def gpu_and_instance(topology: Topology, base: DeviceID) -> tuple[Gpu, MigDevice | None] | None:
    """Returns the GPU, or GPU and MIG instance, of a device id without a share number; None for other devices."""
    gpu = topology.gpu_by_id.get(topology.parent_of(base))
    if gpu is None or gpu.id == base:
        return None if gpu is None else (gpu, None)
    return next((gpu, instance) for instance in gpu.mig or () if instance.uuid == base)


def device_node_paths(gpu: Gpu, instance: MigDevice | None, minors: Mapping[Instance, int]) -> tuple[str, ...]:
    """Returns the device nodes of a GPU, or of a MIG instance with its capabilities. Raises ContainerUnready."""
    if gpu.minor is None:
        raise ContainerUnready(
            f"the driver does not report the device node of {gpu.id}",
            "leave out passDeviceSpecs and the CDI strategies",
        )
    node = f"/dev/nvidia{gpu.minor}"
    if instance is None:
        return (node,)
    try:
        whole = minors[gpu.minor, instance.gpu_instance, None]
        part = minors[gpu.minor, instance.gpu_instance, instance.compute_instance]
    except KeyError as error:
        raise ContainerUnready(
            f"the driver lists no capabilities for MIG instance {instance.uuid}",
            f"see whether /proc/{MINORS} is there and readable",
        ) from error
    return (node, f"/dev/nvidia-caps/nvidia-cap{whole}", f"/dev/nvidia-caps/nvidia-cap{part}")


def mig_minors(proc: Path) -> dict[Instance, int]:
    """Reads the minor numbers of the capabilities of all MIG instances; empty if the driver has no such file."""
    try:
        with (proc / MINORS).open(encoding="ascii", errors="replace") as lines:
            text = lines.read(MOST_MINORS)
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        if named := _MINOR.fullmatch(line.strip()):
            gpu, whole, part, minor = named.groups()
            found[int(gpu), int(whole), None if part is None else int(part)] = int(minor)
    return found


def of_channel(channel: int) -> str:
    """The path of the device node of an IMEX channel."""
    return f"/dev/nvidia-caps-imex-channels/channel{channel}"


def channels(root: HostRoot, imex: Imex) -> tuple[int, ...]:
    """Returns the configured IMEX channels that exist. Raises ContainerUnready if a required one is missing."""
    found = tuple(channel for channel in imex.channel_ids if root.has(of_channel(channel)))
    missing = [channel for channel in imex.channel_ids if channel not in found]
    if missing and imex.required:
        raise ContainerUnready(
            f"IMEX channel {missing[0]} is required, and {root.on_host(of_channel(missing[0]))} is not there",
            "create the channel (nvidia-modprobe, or the driver's NVreg_CreateImexChannel0), or set imex.required to false",
        )
    return found
