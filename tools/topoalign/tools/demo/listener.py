"""
What the demo hears of its node over the bus: the subscriber whose events it prints, and how long it waits for them.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from topoalign.cli.watch_events import EventPrinter
from topoalign.client import Client, Delivery
from topoalign.core.model.errors import InvalidField, Unavailable
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus
from topoalign.tools.demo.stage import MACHINE

LIMIT_SECONDS = 30.0
"""For each thing that is waited for; all of them take well under one."""


class DemoStuck(Unavailable):
    """Raised where something that the demo waits for does not come within `LIMIT_SECONDS`."""

    code = "DemoStuck"

    def __init__(self, what: str, remedy: str = "run it again with TOPOALIGN_LOG_LEVEL=info") -> None:
        super().__init__(f"{what} within {LIMIT_SECONDS:g} s", remedy)


class EventListener:
    """A subscriber of the node's allocations, which prints the events when the demo has come to that step."""

    def __init__(self, bus: Bus, node: NodeName) -> None:
        self._client = Client(bus, name="demo")
        self._printer = EventPrinter(bus)
        self._node = node
        self._heard: list[Delivery] = []
        self._told = 0
        self._more = anyio.Event()

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """
        Collects events until cancelled. It is started when the allocator has announced what is held already, which is not
        printed: nothing after that is missed.
        """
        async with aclosing(self._client.allocations(node=self._node)) as events:
            await anext(events)
            task_status.started()
            async for delivery in events:
                self._heard.append(delivery)
                self._more.set()
                self._more = anyio.Event()

    async def tell_until(self, enough: Callable[[list[Delivery]], bool], *remedy: str) -> None:
        """
        Prints events as they come until those printed are `enough`. Raises DemoStuck, with this remedy, if they never
        are.
        """
        async with time_limit("the events of this step were not received", *remedy):
            while True:
                while self._told < len(self._heard):
                    await self._printer.print(self._heard[self._told])
                    self._told += 1
                if enough(self._heard[: self._told]):
                    return
                await self._more.wait()


async def discovered(bus: Bus, node: NodeName) -> Topology:
    """
    Waits for the topology that discovery publishes of the node. Raises InvalidField for one without GPUs, and
    DemoStuck.
    """
    async with time_limit(f"node {node} was not discovered"), aclosing(Client(bus, name="demo").nodes(node)) as events:
        async for delivery in events:
            if isinstance(delivery.event, TopologyDiscovered):
                if not delivery.event.topology.gpus:
                    raise InvalidField("--machine", "has no GPUs", f"play one that has some: --machine {MACHINE}")
                return delivery.event.topology
    raise DemoStuck(f"node {node} was not discovered")


@asynccontextmanager
async def time_limit(otherwise: str, *remedy: str) -> AsyncIterator[None]:
    """Raises DemoStuck, with the sentence `otherwise`, if the context takes longer than `LIMIT_SECONDS`."""
    try:
        with anyio.fail_after(LIMIT_SECONDS):
            yield
    except TimeoutError as error:
        raise DemoStuck(otherwise, *remedy) from error
