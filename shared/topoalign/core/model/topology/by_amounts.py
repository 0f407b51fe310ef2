"""Which GPUs of a machine are offered by amounts: in units, or in slots."""

from collections.abc import Mapping

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.core.model.topology.views import made_once


@made_once
def offers_in_slots(topology: Topology) -> Mapping[DeviceID, Offer]:
    """GPU that is offered in slots -> its offer, in the hardware's order."""
    found = {gpu: offer for offer in topology.offered if offer.slots and offer.replicas > 1 for gpu in offer.devices}
    return {gpu: found[gpu] for gpu in topology.gpu_by_id if gpu in found}


def is_by_amounts(topology: Topology) -> bool:
    """Whether any GPU is offered in units or in slots."""
    return topology.has_units or bool(offers_in_slots(topology))
