"""
Writes the machine that NVIDIA's driver reports as a description that `--machine` accepts.

`python -m topoalign.tools.capture` prints a summary of the machine; with a folder it writes the machine there, without what
identifies its owner: the shape stays, and globally unique names are replaced. Removed are the uuids of GPUs, MIG instances
and NVLink clusters, the names of network interfaces, which may contain MAC addresses, and values that have a meaning only
on that host. Ends with exit code 69 if no driver works.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Fabric, Gpu, Nic, Topology, VirtualFunction
from topoalign.core.ports import Driver
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.machines.document import Machine, encode_machine
from topoalign.runtime.clock import SystemClock

SECONDS = 30.0
"""For one call of the driver, which takes long to open where nothing keeps it loaded."""
NO_DRIVER = 69


async def captured(driver: Driver) -> Machine:
    """The machine that the driver reports, without the names of its owner. Raises DriverFault."""
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
        file.write_bytes(encode_machine(machine))
        print(f"written to {file}")
    return 0


def anonymous(topology: Topology) -> Topology:
    """The same machine, its GPUs called `GPU-<index>` as in the catalogue."""
    ids = {gpu.id: DeviceID(f"GPU-{gpu.index}") for gpu in topology.gpus}
    ids |= {nic.id: DeviceID(f"mlx5_{nic.index}") for nic in topology.nics}
    clusters = sorted({gpu.fabric.cluster for gpu in topology.gpus if gpu.fabric is not None})
    numbers = {cluster: f"00000000-0000-0000-0000-{number:012}" for number, cluster in enumerate(clusters)}
    return msgspec.structs.replace(
        topology,
        gpus=tuple(nameless_gpu(gpu, ids, numbers) for gpu in topology.gpus),
        nics=tuple(nameless_nic(nic, ids) for nic in topology.nics),
        links=tuple(msgspec.structs.replace(link, a=ids[link.a], b=ids[link.b]) for link in topology.links),
        others=(),
        offers=None,
    )


def nameless_gpu(gpu: Gpu, ids: Mapping[DeviceID, DeviceID], clusters: Mapping[str, str]) -> Gpu:
    """The GPU with replaced ids. `ids`: old id -> new id; `clusters`: NVLink cluster -> new name."""
    parts = gpu.mig and tuple(
        msgspec.structs.replace(part, uuid=DeviceID(f"MIG-{gpu.index}-{part.gpu_instance}-{part.compute_instance}"))
        for part in gpu.mig
    )
    fabric = gpu.fabric and Fabric(cluster=clusters[gpu.fabric.cluster], clique=gpu.fabric.clique)
    return msgspec.structs.replace(gpu, id=ids[gpu.id], mig=parts, fabric=fabric)


def nameless_nic(nic: Nic, ids: Mapping[DeviceID, DeviceID]) -> Nic:
    """The NIC with a replaced id, without network interfaces, verbs device and ids of virtual functions."""
    functions = tuple(VirtualFunction(pci=function.pci) for function in nic.virtual_functions)
    return msgspec.structs.replace(nic, id=ids[nic.id], netdevs=(), verbs=None, virtual_functions=functions)


def shape_name(topology: Topology) -> str:
    """What to call such a machine: `8x-nvidia-h100-80gb-hbm3`; of several kinds of GPU the first."""
    kind = topology.gpus[0].name if topology.gpus else "no gpu"
    word = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return f"{len(topology.gpus)}x-{word or 'gpu'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], NvmlDriver(Path("/"), SystemClock(), SECONDS)))
