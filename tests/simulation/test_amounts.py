"""I14 as the simulation checks it: facts that add up to more than a card has are found, and others are not."""

import pytest
from simulation.amounts import Amounts
from simulation.divisions import ALL_MEMORY, BLOCK
from simulation.loop import SimulatedLoop, simulate
from simulation.world import NODE, World

from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, DeviceID

ALL = {f"GPU-0::c{n}": None for n in range(100)}
Held = dict[str, tuple[int, int] | None]
"""Device -> cores and bytes that are recorded with it."""


def granted(number: int, held: Held) -> AllocationGranted:
    allocation = Allocation(
        id=AllocationID(f"a-{number}"),
        devices={GPU: tuple(map(DeviceID, held))},
        slots={DeviceID(device): Amount(*amount) for device, amount in held.items() if amount is not None},
    )
    return AllocationGranted(node=NODE, epoch=1, seq=number, allocation=allocation)


def found(*grants: Held, released: int = 0) -> list[str]:
    """What the check finds as these are granted, with so many of the first released before the last one comes."""

    async def main(loop: SimulatedLoop) -> list[str]:
        world = World(0, loop)
        amounts = Amounts(world, None)
        for number, held in enumerate(grants):
            if number == len(grants) - 1:
                for gone in range(released):
                    amounts.hear(
                        AllocationReleased(
                            node=NODE, epoch=1, seq=9, allocation=AllocationID(f"a-{gone}"), reason="gone"
                        )
                    )
            amounts.hear(granted(number, held))
        return [violation.invariant for violation in world.violations]

    return simulate(0, main)


@pytest.mark.parametrize(
    "grants",
    [
        ({"GPU-0::0": (60, BLOCK)}, {"GPU-0::1": (50, BLOCK)}),
        ({"GPU-0::0": (10, ALL_MEMORY)}, {"GPU-0::1": (10, BLOCK)}),
        ({"GPU-0::0": (100, BLOCK)}, {"GPU-0::1": None}),
        ({"GPU-0::0": (10, BLOCK)}, {"GPU-0": None}),
        ({"GPU-0::c0": None}, {"MIG-GPU-0-1": None}),
        ({"MIG-GPU-0-1": None}, {"GPU-0::2": (10, BLOCK)}),
        (ALL, {"GPU-0::3": (1, BLOCK)}),
        ({"GPU-0": None}, {"GPU-0::m0": None}),
    ],
)
def test_more_than_a_card_has_and_a_second_way_of_holding_it_are_found(grants: tuple[Held, ...]) -> None:
    assert "I14" in found(*grants)
    assert [] == found(*grants, released=1)


@pytest.mark.parametrize(
    "grants",
    [
        ({"GPU-0::0": (60, BLOCK)}, {"GPU-0::1": (40, BLOCK)}, {"GPU-1::1": (100, BLOCK)}),
        ({"GPU-0::0": None}, {"GPU-0::1": (75, BLOCK)}),
        (ALL, {"GPU-0::m0": None}),
        ({"MIG-GPU-0-0": None}, {"MIG-GPU-0-1": None}, {"GPU-1": None}),
    ],
)
def test_what_a_card_has_may_be_held(grants: tuple[Held, ...]) -> None:
    """A former time slice counts as an equal part; both halves of a share are of one container or of two."""
    assert [] == found(*grants)
