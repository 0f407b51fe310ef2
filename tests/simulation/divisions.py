"""
The machine of a simulated node, and the ways in which its GPUs are offered: whole, in time slices, in units, in slots, in
MIG instances that are there, or in slots that become MIG instances.

What an id is a part of, and how much of its card it stands for, is read here from the id alone, as a reader of it would: no
function of the product is asked.
"""

from typing import Literal, NamedTuple

from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology

CORES, MEMORY = ResourceName("tencent.com/vcuda-core"), ResourceName("tencent.com/vcuda-memory")
INSTANCE = ResourceName("nvidia.com/mig-3g.1gb")
BLOCK, BLOCKS = 256 * 1024 * 1024, 8
"""Bytes of a unit of memory, and how many of them a GPU has."""
ALL_CORES, ALL_MEMORY = 100, BLOCKS * BLOCK
SLICES, SLOTS, INSTANCES = 2, 4, 2
"""Of a GPU that is offered in so many."""
SLICES_OF_MEMORY = 8
"""Of a GPU in MIG mode."""
Division = Literal["whole", "slices", "units", "slots", "mig", "dynamic"]
DIVISIONS: tuple[Division, ...] = ("whole", "slices", "units", "slots", "mig")
"""Between which a run may change."""
Limiter = Literal["none", "vcuda", "hami-core"]
Way = Literal["whole", "share", "unit", "mig", "nic"]
"""How a card is held, as far as an id tells: slots and time slices are spelled alike."""


class Much(NamedTuple):
    """How much of a card an id stands for."""

    cores: float
    """Hundredths of its computing time."""
    memory: float
    """Bytes."""


def machine(division: Division = "whole", first: int = 0, limiter: Limiter = "none") -> Topology:
    """
    Four GPUs and two NICs on two NUMA nodes. `first`: which of the GPUs the driver has numbered 0. In units the last one is
    whole, in MIG instances the last two are. Of slots that become instances the driver tells the rest.
    """
    gpus, nics = tuple(DeviceID(f"GPU-{i}") for i in range(4)), tuple(DeviceID(f"mlx5_{i}") for i in range(2))
    instances = {gpu: instances_of(gpu) for gpu in gpus[:2]} if division == "mig" else {}
    return Topology(
        cpus=tuple(Cpu(id=i, core=i // 2 * 2, socket=i // 4, node=i // 4, uncore=i // 4) for i in range(8)),
        nodes=(NumaNode(id=0), NumaNode(id=1)),
        distances=((10, 21), (21, 10)),
        gpus=tuple(
            Gpu(
                id=gpus[at],
                index=index,
                numa_affinity=(at // 2,),
                memory=ALL_MEMORY,
                mig=instances.get(gpus[at]),
            )
            for index, at in enumerate((*range(first, 4), *range(first)))
        ),
        nics=tuple(Nic(id=name, index=i, numa_affinity=(i,)) for i, name in enumerate(nics)),
        offers=(*offers(division, gpus, limiter), Offer(resource=NIC, devices=nics)) if division != "whole" else None,
    )


def offers(division: Division, gpus: tuple[DeviceID, ...], limiter: Limiter) -> tuple[Offer, ...]:
    match division:
        case "slices":
            return (Offer(resource=GPU, devices=gpus, replicas=SLICES),)
        case "units":
            by = limiter if limiter == "vcuda" else "none"
            return (
                Offer(resource=CORES, devices=gpus[:3], replicas=ALL_CORES, unit="cores", limiter=by),
                Offer(resource=MEMORY, devices=gpus[:3], replicas=BLOCKS, unit="memory", limiter=by),
                Offer(resource=GPU, devices=gpus[3:]),
            )
        case "slots":
            library = limiter if limiter == "hami-core" else "none"
            return (Offer(resource=GPU, devices=gpus, replicas=SLOTS, slots=Slots(), limiter=library),)
        case "dynamic":
            return (Offer(resource=GPU, devices=gpus, replicas=SLOTS, slots=Slots(instances=True)),)
        case "mig":
            held = tuple(each.uuid for gpu in gpus[:2] for each in instances_of(gpu))
            return (Offer(resource=INSTANCE, devices=held), Offer(resource=GPU, devices=gpus[2:]))
        case _:
            return ()


def instances_of(gpu: DeviceID) -> tuple[MigDevice, ...]:
    return tuple(
        MigDevice(
            uuid=DeviceID(f"MIG-{gpu}-{n}"),
            profile="3g.1gb",
            gpu_instance=n + 1,
            compute_instance=0,
            memory=ALL_MEMORY // INSTANCES,
            index=n,
        )
        for n in range(INSTANCES)
    )


def card(device: DeviceID) -> DeviceID:
    """The GPU or NIC that an id belongs to."""
    name = device.partition("::")[0]
    return DeviceID(name.removeprefix("MIG-").rpartition("-")[0] if name.startswith("MIG-") else name)


def way(device: DeviceID) -> Way:
    """How an id holds its card."""
    name, _, number = device.partition("::")
    if name.startswith("MIG-"):
        return "mig"
    if not name.startswith("GPU-"):
        return "nic"
    if not number:
        return "whole"
    return "unit" if number[0] in "cm" else "share"


def much(device: DeviceID) -> Much:
    """Of its card. A share of which nothing else is known is one of `SLOTS` equal parts."""
    match way(device):
        case "whole":
            return Much(ALL_CORES, ALL_MEMORY)
        case "mig":
            return Much(ALL_CORES / INSTANCES, ALL_MEMORY / INSTANCES)
        case "unit":
            return Much(1, 0) if "::c" in device else Much(0, BLOCK)
        case "share":
            return Much(ALL_CORES // SLOTS, ALL_MEMORY // SLOTS)
        case _:
            return Much(0, 0)


MACHINES: dict[Division, Topology] = {each: machine(each) for each in DIVISIONS}
KNOWN = {
    resource: frozenset[DeviceID]().union(*(topology.devices.get(resource, ()) for topology in MACHINES.values()))
    for resource in (GPU, NIC, CORES, MEMORY, INSTANCE)
}
"""All ids under which anything was ever handed out."""
