"""What a container holds by a slot, for the limiters that tell it so (`mps`, `hami_core.answers`)."""

from collections.abc import Mapping

from topoalign.allocator.containers.host import ContainerUnready
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.slot_amounts import equal_part, offered_in_slots


def amount_of_slot(slot: DeviceID, gpu: DeviceID, amounts: Mapping[DeviceID, Amount], hardware: Topology) -> Amount:
    """
    The amount that is recorded for the slot, or else an equal part of `gpu`, which it is of. Raises ContainerUnready for a
    GPU that is not in slots any more. `amounts`: slot -> what is recorded.
    """
    if gpu not in offered_in_slots(hardware):
        raise ContainerUnready(f"{gpu} is not in slots any more", "let the pod be made anew")
    return amounts.get(slot) or equal_part(hardware, gpu)
