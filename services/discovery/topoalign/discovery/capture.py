"""
Writes the machine that NVIDIA's driver reports as a description that `--machine` accepts.

`python -m topoalign.discovery.capture` prints a summary of the machine; with a folder it writes the machine there,
without names that identify its owner. Ends with exit code 69 if no driver works.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from topoalign.core.model.errors import DriverFault
from topoalign.core.ports import Driver
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.machines.anonymous import anonymous, shape_name
from topoalign.machines.document import Machine, encode
from topoalign.runtime.clock import SystemClock

SECONDS = 30.0
"""For one call of the driver, which takes long to open where nothing keeps it loaded."""
NO_DRIVER = 69


async def captured(driver: Driver) -> Machine:
    """The machine as the driver tells it, anonymous. Raises DriverFault."""
    topology = anonymous((await driver.read()).topology)
    return Machine(name=shape_name(topology), topology=topology, source=f"captured by {driver.source}")


def main(arguments: Sequence[str], driver: Driver) -> int:
    """Print a summary of the machine and write it into each folder of `arguments`. Returns the exit code."""
    try:
        machine = anyio.run(captured, driver)
    except DriverFault as fault:
        print(f"no machine to capture: {fault.finding}\n  do: {fault.remedy}", file=sys.stderr)
        return NO_DRIVER
    print(f"{machine.name}: {machine.topology.describe()}")
    for folder in map(Path, arguments):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{machine.name}.json"
        file.write_bytes(encode(machine))
        print(f"written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], NvmlDriver(Path("/"), SystemClock(), SECONDS)))
