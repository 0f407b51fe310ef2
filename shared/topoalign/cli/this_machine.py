"""
The hardware of the machine on which a command runs, for commands that find no running node.

The drivers of discovery read it. Like services, they are found by entry point (group `topoalign.hardware`). The drivers
do not know which pods hold which devices.
"""

import os
import socket
from importlib import metadata

import anyio

from topoalign.core.model.errors import DriverFault, NotFound, TopoalignError
from topoalign.core.ports import Inventory
from topoalign.runtime.settings import PREFIX

ENTRY_POINTS = "topoalign.hardware"


class NothingHere(TopoalignError):
    """No node runs, and this machine has no device to show."""

    code = "NotFound"

    def __init__(self, finding: str) -> None:
        super().__init__(
            f"this machine has nothing to show: {finding}",
            "show a described machine with `topoalign topo --machine NAME|FILE` (see `topoalign topo --help`), run one "
            "with `topoalign up --machine NAME|FILE`, or give --nats URL to use a node that runs elsewhere",
        )


def configured_machine() -> str:
    """The machine that TOPOALIGN_MACHINE describes in place of the hardware; empty if the real hardware is used."""
    real = os.environ.get(PREFIX + "DRIVER") in ("nvml", "sysfs")
    return "" if real else os.environ.get(PREFIX + "MACHINE", "")


def read_inventory() -> Inventory:
    """
    The GPUs and NICs of this machine, as discovery would read them with this environment. Raises NothingHere if there
    are none or the driver fails, and NotFound if discovery is not installed.
    """
    points = metadata.entry_points(group=ENTRY_POINTS)
    if not points:
        raise NotFound("service", "discovery", "install topoalign with its services, or give --nats URL")
    reader = next(iter(points)).load()
    try:
        inventory: Inventory = anyio.run(reader, {PREFIX + "NODE": socket.gethostname().lower(), **os.environ})
    except DriverFault as error:
        raise NothingHere(error.finding) from error
    if not (inventory.topology.gpus or inventory.topology.nics):
        raise NothingHere("; ".join(("no GPU and no RDMA-capable NIC was found", *inventory.findings)))
    return inventory
