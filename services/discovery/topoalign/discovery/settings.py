"""What discovery can be told from outside."""

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
    """A machine to play: a name of the catalogue, or a file that describes one. Empty: the hardware is read."""

    driver: Literal["auto", "nvml", "sysfs", "described"] = "auto"
    """What reads the hardware. Default: `described` if `machine` is set; else NVML, and /sys for as long as NVML fails."""

    sysfs_root: Path = Path("/")
    """What /sys and /proc are below: in a container, where the host's are mounted."""

    read_seconds: Seconds = 10.0
    """Between two readings. On a machine with 256 CPUs one takes about a tenth of a second of one of them."""

    driver_seconds: Seconds = 10.0
    """For one call of a driver. Opening NVML takes some seconds where nothing else keeps the driver loaded."""

    state_dir: Path = Path("/var/lib/topoalign")
    """Where cordons, and which GPUs wait for a reset, are kept: the same directory as the allocator's."""
