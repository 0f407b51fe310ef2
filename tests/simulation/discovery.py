"""Discovery of a simulated node: says what the scenario wants the hardware to be, through the product's announcer."""

import anyio
from simulation.world import NODE, World

from topoalign.core import wire
from topoalign.core.model.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Endpoint
from topoalign.discovery.announcer import Announcer
from topoalign.discovery.service import Epochs
from topoalign.runtime.node_bus import NodeBus
from topoalign.runtime.replies import answer_with


class Discovery:
    """Says what the hardware is."""

    def __init__(self, world: World, bus: Bus, hub: Bus) -> None:
        self._world, self._bus = world, bus
        self._announcer = Announcer(hub, world.clock, bus.near if isinstance(bus, NodeBus) else None)
        self._epochs = Epochs(self._begin, world.clock)
        self._revision = 0

    def _begin(self) -> int:
        """As the record of discovery numbers them."""
        world = self._world
        world.discovery_epoch = max(int(world.clock.wall() * 1000), world.discovery_epoch + 1)
        return world.discovery_epoch

    async def run(self) -> None:
        endpoints = [
            Endpoint(
                name="announce",
                subject=wire.discovery_subject(NODE, "announce"),
                answer=answer_with(NodeRequest, self._anew),
            ),
            self._announcer.endpoint(NODE),
            Endpoint(
                name="alive",
                subject=wire.discovery_subject(NODE, "alive"),
                answer=answer_with(NodeRequest, self._newest),
            ),
        ]
        async with self._bus.serve("topoalign-discovery", endpoints), anyio.create_task_group() as tasks:
            tasks.start_soon(self._announcer.run)
            tasks.start_soon(self._announcer.watch, self.announce)
            while True:
                self.say()
                await self._world.hardware_changed.wait()

    def announce(self) -> None:
        """As `topoalign.discovery.service` does."""
        if not self._epochs.renew():
            self._announcer.request_announce()
        self.say()

    def say(self) -> None:
        """Everything, under a new revision."""
        self._revision += 1
        world = self._world
        self._announcer.submit(
            TopologyDiscovered(
                node=NODE,
                epoch=self._epochs.current,
                revision=self._revision,
                boot_id=f"boot-{world.boot}",
                source="described: simulated",
                topology=world.machine,
            )
        )
        self._announcer.submit(
            DeviceHealthChanged(
                node=NODE, epoch=self._epochs.current, revision=self._revision, devices=dict(world.health)
            )
        )

    async def _anew(self, request: NodeRequest) -> dict[str, tuple[int, int]]:
        self.announce()
        return await self._newest(NodeRequest(node=request.node))

    async def _newest(self, request: NodeRequest) -> dict[str, tuple[int, int]]:
        return {"topology": (self._epochs.current, self._revision), "health": (self._epochs.current, self._revision)}
