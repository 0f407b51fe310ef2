"""Lists the GPUs and MIG instances of a machine that are offered by amounts: in units, or in slots."""

from collections.abc import Mapping

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Topology


@computed_once
def offers_in_slots(topology: Topology) -> Mapping[DeviceID, Offer]:
    """GPU or MIG instance that is offered in slots -> its offer, in the hardware's order."""
    found = {base: offer for offer in topology.offered if offer.slots and offer.replicas > 1 for base in offer.devices}
    bases = (base for gpu in topology.gpus for base in (gpu.id, *(each.uuid for each in gpu.mig or ())))
    return {base: found[base] for base in bases if base in found} if found else {}


def gpu_of(topology: Topology, base: DeviceID) -> Gpu:
    """The GPU itself, or that of which a MIG instance is a part."""
    return topology.gpu_by_id[topology.parent_of(base)]


@computed_once
def is_by_amounts(topology: Topology) -> bool:
    """Whether any GPU or MIG instance is offered in units or in slots."""
    return any(offer.unit is not None for offer in topology.offered) or bool(offers_in_slots(topology))
