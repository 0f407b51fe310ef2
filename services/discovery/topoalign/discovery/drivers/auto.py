"""
NVIDIA's driver as soon as it answers, and the files of /sys until then.

A node agent often starts before the driver is loaded (a driver container, a late module), and a laptop never has one.
Once the driver has answered it is the only source: a later failure is an error to report, and does not bring /sys back.
"""

from typing import TYPE_CHECKING

from topoalign.core.model.errors import DriverFault
from topoalign.core.ports import Driver, Inventory, Listener

if TYPE_CHECKING:  # nobody measures at the start
    from topoalign.core.model.processes import DeviceUse


class AutoDriver:
    """Reads by `nvml` once that works, by `sysfs` before."""

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
        """By the source of the newest reading. Raises DriverFault, as the files of /sys always do."""
        return await self._used.measure()
