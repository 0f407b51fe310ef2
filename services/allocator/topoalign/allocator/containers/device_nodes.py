"""
The device nodes of GPUs, of MIG instances and of what stands beside them, by their paths in a container.

A GPU is /dev/nvidia<minor>, which is not always its index. A MIG instance is its GPU's node and two capabilities, one for
the GPU instance and one for the compute instance; the driver numbers these in a file of /proc. All of them are of no use
without the nodes that every process shares.

Sources: k8s-device-plugin v0.20.0 (internal/plugin, internal/rm, internal/mig, internal/imex).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from topoalign.allocator.containers.host import ContainerUnready, Root
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Imex

SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""What every container with a GPU is told of, as far as it is there."""

MINORS = "driver/nvidia-caps/mig-minors"
_MINOR = re.compile(r"gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)")
MOST_MINORS = 1 << 20
"""Bytes of that file that are read: it has some ten thousand lines at most."""

Instance = tuple[int, int, int | None]
"""GPU minor, GPU instance, compute instance; None for the GPU instance itself."""


def present(root: Root, paths: Iterable[str]) -> tuple[str, ...]:
    """Those of the paths that are there below the root."""
    return tuple(path for path in paths if root.has(path))


def part_of(topology: Topology, base: DeviceID) -> tuple[Gpu, MigDevice | None] | None:
    """
    The GPU, or GPU and MIG instance, that a device id without its share (`base`) names; None for any other device.
    """
    gpu = topology.gpu_by_id.get(topology.card_of(base))
    if gpu is None or gpu.id == base:
        return None if gpu is None else (gpu, None)
    return next((gpu, instance) for instance in gpu.mig or () if instance.uuid == base)


def of_part(gpu: Gpu, instance: MigDevice | None, minors: Mapping[Instance, int]) -> tuple[str, ...]:
    """
    The paths of the device nodes of a GPU, or of one MIG instance: the GPU's, and those of two capabilities.

    `minors` numbers the capabilities. Raises ContainerUnready where the driver does not tell a number.
    """
    if gpu.minor is None:
        raise ContainerUnready(
            f"the driver does not tell the device node of {gpu.id}", "leave out passDeviceSpecs and the CDI strategies"
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
    """
    Reads the minor numbers of the capabilities of all MIG instances from /proc; empty where the driver has no such
    file.
    """
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


def channels(root: Root, imex: Imex) -> tuple[int, ...]:
    """The configured IMEX channels that are there. Raises ContainerUnready if one is missing that must be there."""
    found = tuple(channel for channel in imex.channel_ids if root.has(of_channel(channel)))
    missing = [channel for channel in imex.channel_ids if channel not in found]
    if missing and imex.required:
        raise ContainerUnready(
            f"IMEX channel {missing[0]} is required, and {root.on_host(of_channel(missing[0]))} is not there",
            "create the channel (nvidia-modprobe, or the driver's NVreg_CreateImexChannel0), or set imex.required to false",
        )
    return found
