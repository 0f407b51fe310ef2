"""Units for a container that the kubelet aligns to other NUMA nodes than those of what is reserved for it."""

import pytest
from share_support import NAMES, ShareNode

from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID, ResourceName

pytestmark = pytest.mark.anyio
CORES, MEMORY = NAMES


def units(node: ShareNode, gpu: int, cores: range, blocks: range) -> dict[ResourceName, list[DeviceID]]:
    base = node.machine.gpus[gpu].id
    return {
        CORES: [DeviceID(f"{base}::c{number}") for number in cores],
        MEMORY: [DeviceID(f"{base}::m{number}") for number in blocks],
    }


def elsewhere(node: ShareNode, resource: ResourceName) -> list[DeviceID]:
    """The free units of all GPUs but the first one."""
    state, first = node.ledger.state, node.machine.gpus[0].id
    return [unit for unit in state.ownership.free(resource) if not unit.startswith(f"{first}::")]


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
async def test_both_halves_come_to_a_gpu_that_has_both_left(order: tuple[ResourceName, ...]) -> None:
    """The GPU of which least is left has enough of one half alone: of the other the reservation tells how much it is."""
    async with ShareNode.running() as (node, _):
        node.keep(held=units(node, 1, range(60), range(7)))
        assert isinstance(await node.admit("held", (60, 7)), Admission)
        node.keep(waiting=units(node, 0, range(50), range(2)))
        found = []
        for resource in order:
            size = 50 if resource == CORES else 2
            preferred = await node.allocations.prefer(resource, elsewhere(node, resource), (), size)
            found.append({base_of(unit) for unit in preferred})
            await node.allocations.allocate(resource, [preferred])

        assert 1 == len(found[0]) and found[0] == found[1]
        assert node.machine.gpus[1].id not in found[0]


async def test_what_is_reserved_apart_is_not_preferred() -> None:
    """Of a reservation of which somebody has got one half the other one alone is of no use."""
    async with ShareNode.running() as (node, _):
        torn = {CORES: units(node, 1, range(50), range(0))[CORES], MEMORY: units(node, 0, range(0), range(2))[MEMORY]}
        node.keep(held=units(node, 0, range(60), range(4, 6)))
        assert isinstance(await node.admit("held", (60, 2)), Admission)
        node.keep(waiting=torn)
        offered = [*node.ledger.state.ownership.free(MEMORY)]
        preferred = await node.allocations.prefer(MEMORY, offered, (), 2)

        assert node.machine.gpus[0].id not in {base_of(unit) for unit in preferred}


async def test_what_is_reserved_of_a_gpu_is_taken_last() -> None:
    """Who waits for it may still be told its own units where another one has the GPU's computing time."""
    async with ShareNode.running() as (node, _):
        node.keep(waiting=units(node, 0, range(50), range(2)), other=units(node, 1, range(90), range(3)))
        second = node.machine.gpus[1].id
        offered = [unit for unit in elsewhere(node, MEMORY) if unit.startswith(f"{second}::")]
        preferred = await node.allocations.prefer(MEMORY, offered, (), 2)

        assert [f"{second}::m3", f"{second}::m4"] == [*preferred]
