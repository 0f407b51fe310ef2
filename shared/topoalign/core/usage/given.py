"""
Computes the amounts of computing time and memory of a device that were allocated to containers.

Each unit has a fixed amount. A slot has the amount that is recorded with it, or an equal part of what is offered.
Example: a GPU with 80 GiB has ten slots. A container with slot 3, for which 40 cores and 6000 MiB are recorded, has
these amounts. A container with slot 4, for which nothing is recorded, has 10 cores and 8 GiB. A time slice has no
amount. A slot for which a MIG instance was created counts as this instance.
"""

from collections.abc import Sequence
from typing import NamedTuple

from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.holdings import Amount, Holding, Instance, Unit, Whole, base_of, unit_kind
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import offers_in_slots
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import equal_part, sum_amounts


class HeldShare(NamedTuple):
    """One GPU, or one part of a GPU, that an allocation holds."""

    allocation: Allocation
    device: DeviceID
    """The id that was handed out."""
    holding: Holding
    amount: Amount | None
    """The amount of the GPU that it holds with a slot; None: the device is not a slot."""


def all_held(state: NodeState) -> list[HeldShare]:
    """Everything that is held on a node, in the order of its allocations."""
    return [
        HeldShare(
            allocation,
            device,
            state.ownership.holding(allocation.instances.get(device, device)),
            _amount_by_slot(state.hardware, allocation, device),
        )
        for allocation in state.allocations.values()
        for device in sorted(allocation.device_ids)
    ]


def _amount_by_slot(hardware: Topology, allocation: Allocation, device: DeviceID) -> Amount | None:
    # the recorded amount, or an equal part if there is none; None: the device is not a slot
    gpu = base_of(device)
    if gpu == device or unit_kind(device) is not None or gpu not in offers_in_slots(hardware):
        return None
    return allocation.slots.get(device) or equal_part(hardware, gpu)


def has_amounts(state: NodeState) -> bool:
    """Whether a container holds an amount of a GPU: units, or a slot that is not a MIG instance."""
    return any(
        device not in allocation.instances
        and (unit_kind(device) is not None or _amount_by_slot(state.hardware, allocation, device) is not None)
        for allocation in state.allocations.values()
        for device in allocation.device_ids
    )


def given_to(group: Sequence[HeldShare], memory: int | None) -> tuple[int | None, int | None]:
    """A container's held cores and bytes of a device. `memory`: bytes of the device. None: time slices, or unknown."""
    parts = [each.holding.part for each in group]
    if any(isinstance(part, Whole | Instance) for part in parts):
        return CORES, memory
    if all(isinstance(part, Unit) for part in parts):
        (amount,) = amounts_of({each.device for each in group}).values()
        return amount.cores, memory if amount.cores == CORES else amount.memory
    slots = {each.device: each.amount for each in group if each.amount is not None}
    if {each.device for each in group} != slots.keys():
        return None, None
    amount = sum_amounts(slots.values())
    return amount.cores, amount.memory
