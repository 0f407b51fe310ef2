"""The settings of discovery."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from topoalign.core.model.ids import NodeName

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of discovery, each from the variable `TOPOALIGN_<FIELD>`; the runner sets `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host."""

    machine: str = ""
    """Machine to use in place of the hardware: a name of the catalogue, or a file. Empty: the hardware is read."""

    driver: Literal["auto", "nvml", "sysfs", "described"] = "auto"
    """The driver to use. `auto`: `described` if `machine` is set; otherwise NVML, and /sys until NVML works."""

    sysfs_root: Path = Path("/")
    """The directory that contains /sys and /proc. In a container: the mount point of the host's."""

    read_seconds: Seconds = 10.0
    """Seconds between two readings. On a machine with 256 CPUs, one reading takes about 0.1 s of one CPU."""

    driver_seconds: Seconds = 10.0
    """Seconds per call of a driver. Opening NVML takes some seconds if nothing else keeps the driver loaded."""

    state_dir: Path = Path("/var/lib/topoalign")
    """Directory of the cordons and of the list of GPUs that wait for a reset: the same directory as the allocator's."""
