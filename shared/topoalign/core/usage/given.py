"""
Computes what containers were given of a device, as amounts of computing time and memory.

Units are counted; a slot has the amount that is recorded with it, or an equal part of what is offered. Example: of a GPU of
80 GiB in ten slots, a container with slot 3, recorded with 40 cores and 6000 MiB, was given 40 and 6000 MiB; one with slot 4
and nothing recorded 10 and 8 GiB. A time slice is no amount of anything. A slot that has become a MIG instance is held as
that instance.
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
    """One thing that an allocation holds of a GPU."""

    allocation: Allocation
    device: DeviceID
    """As handed out."""
    holding: Holding
    amount: Amount | None
    """What it holds of its GPU by a slot; None: this is no slot."""


def all_held(state: NodeState) -> list[HeldShare]:
    """All that is held of a node, in the order of its allocations."""
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
    # as it is recorded, or else an equal part; None: the device is no slot
    gpu = base_of(device)
    if gpu == device or unit_kind(device) is not None or gpu not in offers_in_slots(hardware):
        return None
    return allocation.slots.get(device) or equal_part(hardware, gpu)


def has_amounts(state: NodeState) -> bool:
    """Whether somebody holds an amount of memory of a GPU: units, or a slot that is no MIG instance."""
    return any(
        device not in allocation.instances
        and (unit_kind(device) is not None or _amount_by_slot(state.hardware, allocation, device) is not None)
        for allocation in state.allocations.values()
        for device in allocation.device_ids
    )


def given_to(group: Sequence[HeldShare], memory: int | None) -> tuple[int | None, int | None]:
    """Cores and bytes that a container was given of a device with this much memory. None: time slices."""
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
