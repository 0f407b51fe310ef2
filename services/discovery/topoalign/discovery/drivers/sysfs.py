"""
A node read from the files of /sys and /proc alone, for machines without NVIDIA's driver library.

Files tell where a GPU sits but not whether it works, so its health is unknown and it is not offered.
"""

from pathlib import Path

from topoalign.core.errors import DriverFault, InvalidMachine
from topoalign.core.ports import Clock, Inventory
from topoalign.core.topology.model import Topology
from topoalign.discovery.drivers.health import nic_health, unknown
from topoalign.discovery.drivers.thread import DriverThread, Steps
from topoalign.machines.sysfs import read_sysfs


class SysfsDriver:
    """Reads the tree below a root, `/` for this host."""

    source = "sysfs"

    def __init__(self, root: Path, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds, for one reading."""
        self._root = root
        self._thread = DriverThread("sysfs", clock, deadline)

    async def read(self) -> Inventory:
        topology = await self._thread.run(self._read)
        unjudged = unknown("only its driver can tell, and /sys is all that is read")
        return Inventory(
            topology=topology,
            health={gpu.id: unjudged for gpu in topology.gpus} | {nic.id: nic_health(nic) for nic in topology.nics},
        )

    def _read(self, steps: Steps) -> Topology:
        steps("a reading of /sys")
        return files_below(self._root)


def files_below(root: Path) -> Topology:
    """Raises DriverFault where the files make no machine."""
    try:
        return read_sysfs(root)
    except InvalidMachine as error:
        raise DriverFault(error.finding, "mount the host's /sys and /proc, or name their root") from error


def boot_id(root: Path) -> str | None:
    """The kernel's id of this boot; None where the tree has none."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None
