"""
Adds the limiter vcuda to Allocate's answers: the directory of the units, and the library if it is configured.

Computing time and memory of a container have separate answers, and of two mounts at one path the kubelet keeps one. Either
directory works, because both have the same content before the container starts (`limiter`).
"""

import os
from pathlib import Path

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import make_root
from topoalign.allocator.containers.responses import ContainerDevices, EditProvider
from topoalign.allocator.containers.vcuda.unit_directories import units_directory_name
from topoalign.kubelet.control_groups import HIERARCHIES, PROCESSES, sees_all_processes
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Flags

CONTAINER_DIRECTORY = "/etc/vcuda"
CONTAINER_LIBRARIES = "/usr/local/nvidia"
LIBRARY_PATH = "LD_LIBRARY_PATH"


class VcudaEdits(EditProvider, frozen=True):
    """Adds what one resource needs of the limiter to answers to Allocate."""

    root: str
    """`flags.vcudaRoot`, on the host."""
    libraries: str
    """`flags.vcudaLibraries`, on the host; empty: containers get the library in another way."""

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds the mounts for a container that was given these units, and where its libraries are."""
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
        remedy = "see that flags.vcudaRoot is a directory on the host that the agent may write"
        raise ContainerUnready(finding, remedy) from error
    return VcudaEdits(flags.vcuda_root.rstrip("/"), flags.vcuda_libraries)


def is_root(hierarchy: Path) -> bool:
    """Whether this is the host's hierarchy of control groups, and not the container's; version 1 does not show that."""
    # In version 2 the root is the only group without events ("Control Group v2" of the kernel's documentation).
    return os.path.isfile(hierarchy / PROCESSES) and not os.path.exists(hierarchy / "cgroup.events")
