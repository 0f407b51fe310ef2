"""The settings of discovery."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from topoalign.core.model.ids import NodeName

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each; the runner fills in `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host."""

    machine: str = ""
    """A machine in place of the hardware: a name of the catalogue, or a file that describes one. Empty: the hardware."""

    driver: Literal["auto", "nvml", "sysfs", "described"] = "auto"
    """The adapter that reads the hardware. `auto`: `described` if `machine` is set; else NVML, and /sys while NVML fails."""

    sysfs_root: Path = Path("/")
    """The directory that contains /sys and /proc. In a container: the mount point of the host's."""

    read_seconds: Seconds = 10.0
    """Seconds between two readings. On a machine with 256 CPUs one takes about a tenth of a second of one CPU."""

    driver_seconds: Seconds = 10.0
    """Seconds for one call of a driver. Opening NVML takes some seconds if nothing else keeps the driver loaded."""

    state_dir: Path = Path("/var/lib/topoalign")
    """Directory of the cordons and of the list of GPUs that wait for a reset: the same as the allocator's."""
