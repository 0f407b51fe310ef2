"""
Reads a node from the files of /sys and /proc alone, for machines without NVIDIA's driver library.

Files show the place of a GPU but not whether it works, so its health is unknown and it is not offered. A GPU whose uuid
no driver has reported is not even listed: the kubelet and the ledger remember devices by their ids, and an id made of a
PCI address would belong to another GPU after the GPU in that slot is exchanged.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from topoalign.core.model.errors import DriverFault, InvalidMachine
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, Inventory, Listener
from topoalign.discovery.drivers.reading_health import nic_health, unknown_health
from topoalign.machines.sysfs_machine import is_named_by_address, read_sysfs
from topoalign.runtime.driver_thread import CallProgress, DriverThread

if TYPE_CHECKING:  # nobody measures at the start
    from topoalign.core.model.processes import DeviceUse


class SysfsDriver:
    """Reads the tree below a root, `/` for this host."""

    source = "sysfs"

    def __init__(self, root: Path, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds, for one reading."""
        self._root = root
        self._thread = DriverThread("sysfs", clock, deadline)

    async def read(self) -> Inventory:
        """Read /sys and /proc; the health of GPUs is unknown. Raises DriverFault."""
        topology, findings = await self._thread.run(self._read)
        unjudged = unknown_health("only its driver reports it, and only /sys is read")
        return Inventory(
            topology=topology,
            health={gpu.id: unjudged for gpu in topology.gpus} | {nic.id: nic_health(nic) for nic in topology.nics},
            findings=findings,
        )

    async def watch(self, listener: Listener) -> None:
        """Returns at once: files report no events."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Raises DriverFault: the files do not show the use of GPUs."""
        raise DriverFault("the files of /sys do not show the use of GPUs", "install NVIDIA's driver, which does")

    def _read(self, steps: CallProgress) -> tuple[Topology, tuple[str, ...]]:
        steps("a reading of /sys")
        return with_named_gpus(files_below(self._root))


def files_below(root: Path) -> Topology:
    """Reads the machine from the files. Raises DriverFault if they do not describe a possible machine."""
    try:
        return read_sysfs(root)
    except InvalidMachine as error:
        raise DriverFault(error.finding, "mount the host's /sys and /proc, or name their root") from error


def with_named_gpus(files: Topology) -> tuple[Topology, tuple[str, ...]]:
    """Returns the machine without the GPUs that have no uuid, and a finding for each of these."""
    left_out = {gpu.id: gpu for gpu in files.gpus if is_named_by_address(gpu)}
    topology = msgspec.structs.replace(
        files,
        gpus=tuple(gpu for gpu in files.gpus if gpu.id not in left_out),
        links=tuple(link for link in files.links if left_out.keys().isdisjoint((link.a, link.b))),
    )
    return topology, tuple(
        f"GPU {gpu.index} at {gpu.pci} has no uuid and is left out: NVIDIA's driver does not have it"
        for gpu in left_out.values()
    )
