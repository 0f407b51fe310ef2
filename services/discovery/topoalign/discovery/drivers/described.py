"""
A described machine: a name of the catalogue, or a file in any format that `topoalign.machines` reads.

All its devices are healthy. A file is read again each time, so that an edit of it is a change of the hardware.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from anyio import to_thread

from topoalign.core.model.errors import DriverFault, TopoalignError
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Inventory, Listener
from topoalign.discovery.drivers.health import HEALTHY
from topoalign.machines import load_machine

if TYPE_CHECKING:  # nobody measures at the start
    from topoalign.core.model.processes import DeviceUse


class DescribedDriver:
    """Plays a described machine."""

    def __init__(self, machine: str) -> None:
        """Raises NotFound, InvalidMachine or InvalidField: what is wrong at the start is the configuration."""
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
        """Nothing happens to a machine that is described."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Raises DriverFault: nothing runs on a machine that is described."""
        raise DriverFault(f"nothing runs on a machine that is {self.source}", "ask a node that has GPUs")


def topology_in(file: str) -> Topology:
    """Raises DriverFault where the file no longer describes a machine."""
    try:
        return load_machine(file).topology
    except TopoalignError as error:
        raise DriverFault(f"{file}: {error.finding}", error.remedy) from error
