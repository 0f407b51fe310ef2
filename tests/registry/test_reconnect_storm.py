"""Hundreds of nodes come back at once, and the registry goes on answering."""

from contextlib import AsyncExitStack

import anyio
import pytest
from decision_support import container, machine, pod
from faults_support import THOROUGH
from registry_support import World
from view_support import RULES, TIME, Says, asked

from topoalign.core import wire
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.shapes import Shapes
from topoalign.registry.scheduling.scheduling_api import Filtered

pytestmark = pytest.mark.anyio

NODES = 500 if THOROUGH else 100
POD = asked(pod(container("main", gpus=2)))


def started(number: int, epoch: int, shapes: Shapes) -> Says:
    """The agent of a node, which has started in this epoch."""
    says = Says(f"node-{number}", machine(), RULES, shapes, epoch)
    says.revision = epoch * 10
    return says


async def test_no_node_is_dropped_when_hundreds_come_back_at_once() -> None:
    """C47: each says all of it anew, while the registry asks all of them and the scheduler asks the registry."""
    world, shapes = World(), Shapes()
    nodes = [started(number, 5, shapes) for number in range(NODES)]
    names = [NodeName(each.node) for each in nodes]
    for says in nodes:
        for event in says.all():
            await world.bus.publish(wire.encode_event(event, TIME))
    async with world.registry() as (scheduling, _):
        async with AsyncExitStack() as stack:
            for says in nodes:
                await stack.enter_async_context(world.allocator(says))
            await world.rounds()
            before = scheduling.scheduler.filter(POD, names)
        await world.rounds()
        away = scheduling.scheduler.filter(POD, names)
        meanwhile: list[Filtered] = []
        back = [started(number, 6, shapes) for number in range(NODES)]
        async with AsyncExitStack() as stack:
            for says in back:
                await stack.enter_async_context(world.allocator(says))
            async with anyio.create_task_group() as tasks:
                for says in back:
                    tasks.start_soon(come_back, world, says)
                for _ in range(5):
                    await world.clock.advance(3)
                    meanwhile.append(scheduling.scheduler.filter(POD, names))
            await world.rounds()
            after = scheduling.scheduler.filter(POD, names)

    assert (NODES, 0, NODES) == (len(before.passed), len(away.passed), len(after.passed))
    assert [NODES] * 5 == [len(each.passed) + len(each.refused) for each in meanwhile]
    assert {"NodeStale"} == {each.code for each in away.refused.values()}


async def come_back(world: World, says: Says) -> None:
    for event in says.all():
        await world.bus.publish(wire.encode_event(event, TIME))
