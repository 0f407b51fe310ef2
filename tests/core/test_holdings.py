"""What an id stands for, and which holdings overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.allocations import ResourceGrant
from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import (
    WHOLE,
    FunctionHolding,
    Holding,
    HoldingSet,
    Instance,
    TimeSlice,
    holding_of,
    wholes_of,
)
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID

G, N = DeviceID("GPU-x"), DeviceID("mlx5_1")
MIG, VF = DeviceID("MIG-y"), DeviceID("0000:99:00.1")
CARDS = {MIG: G, VF: N}

IDS = [
    (G, Holding(G, WHOLE)),
    (DeviceID("GPU-x::3"), Holding(G, TimeSlice("3"))),
    (MIG, Holding(G, Instance(MIG))),
    (DeviceID("MIG-y::0"), Holding(G, TimeSlice("0", Instance(MIG)))),
    (VF, Holding(N, FunctionHolding(VF))),
    (DeviceID("0000:99:00.1::7"), Holding(N, TimeSlice("7", FunctionHolding(VF)))),
    (DeviceID("MIG-z"), Holding(DeviceID("MIG-z"))),
]
"""What is handed out, and the holding that it stands for; of MIG-z no card is known."""


@pytest.mark.parametrize(("device", "expected"), IDS)
def test_an_id_is_read_into_a_holding_and_back(device: DeviceID, expected: Holding) -> None:
    found = holding_of(device, CARDS)

    assert expected == found
    assert (device, device.split("::")[0]) == (found.id, found.base)


@given(st.text(alphabet="ab:0", max_size=8))
def test_no_two_ids_stand_for_the_same(text: str) -> None:
    """Whatever a forged record has for an id."""
    assert text == holding_of(DeviceID(text), CARDS).id


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Holding(G), Holding(G, TimeSlice("3")), True),
        (Holding(G), Holding(G, TimeSlice("0", Instance(MIG))), True),
        (Holding(G, Instance(MIG)), Holding(G, TimeSlice("0", Instance(MIG))), True),
        (Holding(G, Instance(MIG)), Holding(G, Instance(DeviceID("MIG-other"))), False),
        (Holding(G, TimeSlice("3")), Holding(G, TimeSlice("4")), False),
        (Holding(G, TimeSlice("3")), Holding(G, TimeSlice("3")), True),
        (Holding(G, TimeSlice("3")), Holding(DeviceID("GPU-other"), TimeSlice("3")), False),
        (Holding(N), Holding(N, FunctionHolding(VF)), True),
    ],
)
def test_holdings_overlap_that_are_the_same_or_whole_and_part(one: Holding, other: Holding, expected: bool) -> None:
    assert (expected, expected) == (HoldingSet([one]).overlaps(other), HoldingSet([other]).overlaps(one))


def test_what_a_holding_is_a_part_of_is_named_from_near_to_far() -> None:
    slice_of_instance = Holding(G, TimeSlice("0", Instance(MIG)))

    assert (Holding(G, Instance(MIG)), Holding(G)) == wholes_of(slice_of_instance)


def test_an_allocation_holds_what_its_record_says_in_any_of_its_fields() -> None:
    """`devices` with the number of a share, `cards` and `virtual_functions`, as journals have them."""
    held = Allocation(
        id=AllocationID("a"),
        devices={GPU: (DeviceID("GPU-x::3"), DeviceID("MIG-y::0")), NIC: (VF, DeviceID("mlx5_0"))},
        parents=CARDS,
        virtual_functions={DeviceID("mlx5_0"): ("0000:98:00.1", "0000:98:00.2")},
    )

    assert {
        GPU: ResourceGrant([], {G: ["3"], MIG: ["0"]}),
        NIC: ResourceGrant([Holding(N, FunctionHolding(VF))], {}),
    } == held.given
    assert {VF, "0000:98:00.1", "0000:98:00.2"} == held.function_addresses


@pytest.mark.parametrize("functions", [{N: ()}, {N: (VF,), DeviceID("mlx5_0"): ()}, {DeviceID("other"): (VF,)}])
def test_functions_are_those_of_nics_that_are_held_and_each_has_some(
    functions: dict[DeviceID, tuple[str, ...]],
) -> None:
    """A record that says otherwise is refused where it is read."""
    with pytest.raises(ValueError, match="virtual functions"):
        Allocation(id=AllocationID("a"), devices={NIC: (N, DeviceID("mlx5_0"))}, virtual_functions=functions)


def test_an_allocation_tells_what_is_whole_and_what_is_a_part() -> None:
    held = Allocation(
        id=AllocationID("a"),
        devices={GPU: (DeviceID("GPU-x::3"), MIG), NIC: (N, DeviceID("mlx5_0"))},
        parents=CARDS,
        virtual_functions={N: (VF,)},
        cpus="0-2,5",
    )

    assert {"GPU-x::3", MIG, N, "mlx5_0"} == held.device_ids
    assert {"GPU-x::3", MIG, "mlx5_0"} == held.whole_ids
    assert {0, 1, 2, 5} == held.cpu_ids
