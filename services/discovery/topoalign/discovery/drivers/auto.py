"""
Reads NVIDIA's driver as soon as it answers, and the files of /sys until then.

A node agent often starts before the driver is loaded (a driver container, a late module), and a laptop never has one.
Once the driver has answered it is the only source: a later failure is an error to report, and does not bring /sys back.
"""

from typing import TYPE_CHECKING

from topoalign.core.model.errors import DriverFault
from topoalign.core.ports import Driver, Inventory, Listener

if TYPE_CHECKING:  # nobody measures at the start
    from topoalign.core.model.processes import DeviceUse
from pathlib import Path

from anyio import to_thread

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.topology.model import Topology
from topoalign.discovery.drivers.reading_health import HEALTHY
from topoalign.machines import load_machine

# A described machine: a name of the catalogue, or a file in any format that `topoalign.machines` reads.
#
# All its devices are healthy. A file is read again each time, so that an edit of it is a change of the hardware.


class DescribedDriver:
    """Reports a described machine as the hardware of the node."""

    def __init__(self, machine: str) -> None:
        """Raises NotFound, InvalidMachine or InvalidField: an error at the start is one of the configuration."""
        loaded = load_machine(machine)
        self.source = f"described: {loaded.name}"
        self._topology = loaded.topology
        self._file = machine if loaded.source != "catalogue" and Path(machine).is_file() else None

    async def read(self) -> Inventory:
        """The described machine, all devices healthy. Raises DriverFault for a file that cannot be read."""
        if self._file is not None:
            self._topology = await to_thread.run_sync(topology_in, self._file)
        devices = (*self._topology.gpu_by_id, *self._topology.nic_by_id)
        return Inventory(topology=self._topology, health=dict.fromkeys(devices, HEALTHY))

    async def watch(self, listener: Listener) -> None:
        """Returns at once: a described machine has no events."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Raises DriverFault: nothing runs on a described machine."""
        raise DriverFault(f"nothing runs on a machine that is {self.source}", "ask a node that has GPUs")


def topology_in(file: str) -> Topology:
    """Reads the file again. Raises DriverFault if it no longer describes a machine."""
    try:
        return load_machine(file).topology
    except TopoalignError as error:
        raise DriverFault(f"{file}: {error.finding}", error.remedy) from error


class AutoDriver:
    """Reads through `nvml` once that works, and through `sysfs` before."""

    def __init__(self, nvml: Driver, sysfs: Driver) -> None:
        self._nvml = nvml
        self._sysfs = sysfs
        self._used = sysfs

    @property
    def source(self) -> str:
        """The source of the newest reading: `nvml` or `sysfs`."""
        return self._used.source

    async def read(self) -> Inventory:
        """Read NVML; until it has answered once, /sys if NVML fails. Raises DriverFault."""
        try:
            inventory = await self._nvml.read()
        except DriverFault as fault:
            if self._used is self._nvml:
                raise
            files = await self._sysfs.read()
            if not (files.topology.gpus or files.findings):
                return files  # a machine without GPUs
            return Inventory(
                topology=files.topology,
                health=files.health,
                findings=(*files.findings, f"GPUs are known from /sys only: {fault.finding}"),
            )
        self._used = self._nvml
        return inventory

    async def watch(self, listener: Listener) -> None:
        """The files of /sys report nothing; NVML does once it answers."""
        await self._nvml.watch(listener)

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures through the source of the newest reading. Raises DriverFault, as the files of /sys always do."""
        return await self._used.measure()
