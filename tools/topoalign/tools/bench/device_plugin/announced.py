"""
Takes the place of discovery for an allocator that runs alone: publishes topology and health, and confirms them on
request.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from topoalign.core import wire
from topoalign.core.model.events import HEALTHY, DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Endpoint
from topoalign.runtime.replies import answer_with

UNHEALTHY = DeviceHealth(state=HealthState.UNHEALTHY, reason="played")


class Announced:
    """A node of which everything is announced by us."""

    def __init__(self, bus: Bus, node: NodeName, topology: Topology) -> None:
        self._bus = bus
        self._node = node
        self._topology = topology
        self._revision = 0
        self._newest: dict[str, tuple[int, int]] = {}
        self.asked = anyio.Event()
        """Set when the allocator has asked for the first time."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Confirm the published topology and health on request while the context is open."""

        async def newest(_: NodeRequest) -> dict[str, tuple[int, int]]:
            self.asked.set()
            return self._newest

        alive = Endpoint(
            name="alive", subject=wire.discovery_subject(self._node, "alive"), answer=answer_with(NodeRequest, newest)
        )
        async with self._bus.serve("topoalign-discovery", [alive]):
            yield

    async def discover(self) -> None:
        """The hardware, all of it healthy."""
        found = TopologyDiscovered(
            node=self._node, epoch=1, revision=1, boot_id="bench", source="described: bench", topology=self._topology
        )
        self._newest["topology"] = (1, 1)
        await self._bus.publish(wire.encode_event(found, time.time()))
        await self.judge(True)

    async def judge(self, all_healthy: bool) -> float:
        """All GPUs are healthy, or all but the first. When it was said: monotonic seconds."""
        devices = dict.fromkeys(self._topology.gpu_by_id, HEALTHY)
        if not all_healthy:
            devices[self._topology.gpus[0].id] = UNHEALTHY
        self._revision += 1
        self._newest["health"] = (1, self._revision)
        changed = DeviceHealthChanged(node=self._node, epoch=1, revision=self._revision, devices=devices)
        message = wire.encode_event(changed, time.time())
        said = time.monotonic()
        await self._bus.publish(message)
        return said
