"""A gang is not planned on what is reserved for a pod that has terminated, before the end of that reservation is stored."""

from collections.abc import Sequence

import pytest
from api_server_support import shown_pod
from bus_support import FailingBus
from decision_support import machine
from registry_support import World
from view_support import NODE, RULES, Says

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.scheduling.binding.gang_binding import GangWaits
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


async def test_a_gang_gets_nothing_that_is_still_reserved_for_a_terminated_pod() -> None:
    """S16. Its end is known, and is not stored yet: another registry would see devices that are reserved for two pods."""
    bus = FailingBus()
    world = World(bus=bus)
    other = Says(NodeName("node-2"), machine(), RULES)
    for says in (world.says, other):
        world.kubernetes.add_node(says.node)
        await world.say(*says.all())

    def create(name: str, **annotations: str) -> str:
        pod = shown_pod(name, gpus=3)
        pod["metadata"]["annotations"] |= annotations
        return str(world.kubernetes.add_pod(pod)["metadata"]["uid"])

    def reserved(nodes: Sequence[NodeName]) -> list[list[str]]:
        return [sorted(each.pod for each in scheduling.reservations.held(node)) for node in nodes]

    async with world.allocator(world.says), world.allocator(other), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", "a", create("a"), NODE)
        await all_tasks_blocked()
        bus.refusal = BusUnavailable("no answer")
        world.kubernetes.delete_pod("ml", "a", grace=0)
        one, _two = (create(name, **{GANG: "g", GANG_SIZE: "2"}) for name in ("b", "c"))
        await all_tasks_blocked()
        with pytest.raises(GangWaits):
            await scheduling.bind("ml", "b", one, NODE)
        waiting = reserved([NODE, other.node])
        bus.refusal = None
        await world.clock.advance(1)
        await all_tasks_blocked()
        await scheduling.bind("ml", "b", one, NODE)

        assert [["a"], []] == waiting
        assert [["b"], ["c"]] == reserved([NODE, other.node])
