"""Whatever is asked about reservations, they count up to the second at which they end, and not from then on."""

from collections.abc import Callable

import pytest
from decision_support import node
from fact_support import changed, reservation
from slot_support import in_slots
from unit_support import DGX

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.placement.reserved_choice import (
    open_reservations,
    prefer_reserved,
    reserved_devices,
    reserved_with,
)
from topoalign.core.sharing.reserved_shares import (
    ShareQuestion,
    amounts_reserved,
    displaced_pod,
    iterate_open_parts,
    pods_reserved_for,
    reservations_of,
    with_reserved_shares,
)
from topoalign.core.state.node_reservations import NodeReservations

SECONDS = 30.0
STATE = node(in_slots(DGX))
SLOTS = (DeviceID(f"{DGX.gpus[0].id}::0"), DeviceID(f"{DGX.gpus[1].id}::0"))
AMOUNTS = dict.fromkeys(SLOTS, Amount(cores=20, memory=1 << 30))
OTHERS = (DeviceID(f"{DGX.gpus[0].id}::1"), DeviceID(f"{DGX.gpus[1].id}::1"))
TAKEN = STATE.holding(Allocation(id=AllocationID("another pod's"), devices={GPU: SLOTS}))

Ask = Callable[[NodeReservations, float], object]
QUESTIONS: dict[str, Ask] = {
    "held": lambda reserved, now: reserved.held(now),
    "open_reservations": lambda reserved, now: [*open_reservations(reserved, now, GPU)],
    "prefer_reserved": lambda reserved, now: prefer_reserved(STATE.hardware, reserved, now, GPU, SLOTS, (), 2),
    "reserved_with": lambda reserved, now: reserved_with(reserved, now, GPU, SLOTS),
    "reserved_devices": lambda reserved, now: reserved_devices(reserved, now, GPU),
    "reservations_of": lambda reserved, now: [*reservations_of(reserved, now, GPU, SLOTS)],
    "amounts_reserved": lambda reserved, now: amounts_reserved(reserved, now, GPU, SLOTS),
    "pods_reserved_for": lambda reserved, now: pods_reserved_for(reserved, now, GPU, AMOUNTS),
    "displaced_pod": lambda reserved, now: displaced_pod(TAKEN, reserved, now, GPU, OTHERS),
    "iterate_open_parts": lambda reserved, now: [
        *iterate_open_parts(STATE, reserved, now, ShareQuestion(GPU, SLOTS, (), 2))
    ],
    "with_reserved_shares": lambda reserved, now: with_reserved_shares(STATE, reserved, now).allocations,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_reservation_counts_up_to_its_end(name: str) -> None:
    of_slots = ReservedContainer(container=ContainerName("main"), devices={GPU: SLOTS}, slots=AMOUNTS)
    reserved = NodeReservations().apply(changed(reservation("a", of_slots, seconds=SECONDS)), 1, 0.0)

    assert QUESTIONS[name](reserved, SECONDS - 0.1)
    assert not QUESTIONS[name](reserved, SECONDS)
