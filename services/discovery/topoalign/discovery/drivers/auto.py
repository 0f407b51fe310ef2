"""
The drivers that need no library: the files of /sys and /proc, a described machine, and the choice between NVML and /sys.

The files show where a GPU is connected, but not whether it works, so its health is unknown and it is not offered. A GPU
whose uuid no driver has reported is not even listed: the kubelet and the ledger identify devices by their ids, and an
id made of a PCI address would belong to another GPU after the GPU in that slot is replaced.

A node agent often starts before NVIDIA's driver is loaded (by a driver container, or late by the kernel), and a laptop
may never have it. So the files are read until the driver answers. After that, the driver is the only source: a later
failure is reported as an error, and /sys is not used in its place.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from anyio import to_thread

from topoalign.core.model.errors import DriverFault, InvalidMachine, TopoalignError
from topoalign.core.model.events import HEALTHY
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, Driver, Inventory, Listener
from topoalign.discovery.drivers.reading_health import nic_health, unknown_health
from topoalign.machines import load_machine
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import is_named_by_address, read_sysfs
from topoalign.runtime.driver_thread import CallProgress, DriverThread

if TYPE_CHECKING:  # not needed before the first measurement
    from topoalign.core.model.processes import DeviceUse


class SysfsDriver:
    """Reads the files below a root directory, which is `/` for this host."""

    source = "sysfs"

    def __init__(self, root: Path, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds, for one reading."""
        self._root = root
        self._thread = DriverThread("sysfs", clock, deadline)

    async def read(self) -> Inventory:
        """Reads /sys and /proc; the health of GPUs is unknown. Raises DriverFault."""
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
        return _with_named_gpus(files_below(self._root))


def files_below(root: Path) -> Topology:
    """Reads the machine from the files. Raises DriverFault if they do not describe a possible machine."""
    try:
        return read_sysfs(Tree(root))
    except InvalidMachine as error:
        raise DriverFault(error.finding, "mount the host's /sys and /proc, or name their root") from error


def _with_named_gpus(files: Topology) -> tuple[Topology, tuple[str, ...]]:
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


class DescribedDriver:
    """Reports a described machine from the catalogue or from a file (read each time). All devices are healthy."""

    def __init__(self, machine: str) -> None:
        """Raises NotFound, InvalidMachine or InvalidField: an error at the start is an error of the configuration."""
        loaded = load_machine(machine)
        self.source = f"described: {loaded.name}"
        self._topology = loaded.topology
        self._file = machine if loaded.source != "catalogue" and Path(machine).is_file() else None

    async def read(self) -> Inventory:
        """Returns the described machine with all devices healthy. Raises DriverFault if the file cannot be read."""
        if self._file is not None:
            try:
                self._topology = (await to_thread.run_sync(load_machine, self._file)).topology
            except TopoalignError as error:
                raise DriverFault(f"{self._file}: {error.finding}", error.remedy) from error
        devices = (*self._topology.gpu_by_id, *self._topology.nic_by_id)
        return Inventory(topology=self._topology, health=dict.fromkeys(devices, HEALTHY))

    async def watch(self, listener: Listener) -> None:
        """Returns at once: a described machine has no events."""

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Raises DriverFault: nothing runs on a described machine."""
        raise DriverFault(f"nothing runs on a machine that is {self.source}", "ask a node that has GPUs")


class AutoDriver:
    """Reads through `sysfs` until `nvml` works, and then through `nvml`."""

    def __init__(self, nvml: Driver, sysfs: Driver) -> None:
        self._nvml = nvml
        self._sysfs = sysfs
        self._used = sysfs

    @property
    def source(self) -> str:
        """The source of the newest reading: `nvml` or `sysfs`."""
        return self._used.source

    async def read(self) -> Inventory:
        """Reads NVML. If NVML fails and has never answered, reads /sys. Raises DriverFault."""
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
        """Receives events from NVML once it answers; the files of /sys report no events."""
        await self._nvml.watch(listener)

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures through the source of the newest reading. Raises DriverFault, as the files of /sys always do."""
        return await self._used.measure()
