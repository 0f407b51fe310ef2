"""Machines whose GPUs are offered in units of computing time and of memory."""

import msgspec

from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import MEMORY_BLOCK, Offer
from topoalign.core.model.topology.validate import validate

CORES, MEMORY = ResourceName("tencent.com/vcuda-core"), ResourceName("tencent.com/vcuda-memory")


def in_units(topology: Topology, gpus: int = 8, cores: ResourceName = CORES, memory: ResourceName = MEMORY) -> Topology:
    """The machine with its first GPUs in units under these names, the others whole."""
    shared, whole = topology.gpus[:gpus], topology.gpus[gpus:]
    by_blocks: dict[int, list[DeviceID]] = {}
    for gpu in shared:
        by_blocks.setdefault((gpu.memory or 0) // MEMORY_BLOCK, []).append(gpu.id)
    offers = [Offer(resource=cores, devices=tuple(gpu.id for gpu in shared), replicas=100, unit="cores")]
    offers += [
        Offer(resource=memory, devices=tuple(devices), replicas=blocks, unit="memory")
        for blocks, devices in by_blocks.items()
    ]
    if whole:
        offers.append(Offer(resource=GPU, devices=tuple(gpu.id for gpu in whole)))
    found = msgspec.structs.replace(topology, offers=tuple(offers))
    validate(found)
    return found
