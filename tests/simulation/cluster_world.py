"""
What a simulated cluster stands on: the seed's chance, virtual time, the API server, the bus, and the trace.

Each process reaches the bus and the API server by a network of its own (`Network`): calls on it are late or lost as often as
the seed says, and it can be cut off from either.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from simulation.bus import AWAY_SECONDS, LATE_SECONDS, Broker, FaultyBus, happens
from simulation.loop import Main, Process, SimulatedLoop
from simulation.registry_shares import Division, compat_of, division_of, hardware_of
from simulation.world import SimulatedClock, Trace, Violation

from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Answer, Endpoint, Received, Stream
from topoalign.registry.ports import ApiUnavailable, GoneObject, SeenPod, Synced
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.memory_kubernetes import MemoryKubernetes

T = TypeVar("T")
RATES = (0.0, 0.02, 0.1)
"""How likely a call over the network is late; half as likely its answer is lost, before or after the effect."""
GPUS: Mapping[Division, Sequence[int]] = {"whole": (0, 0, 1, 1), "slots": (0, 0, 1), "units": (0, 1)}
"""NUMA nodes of the GPUs of each node. Each unit and each slot costs time."""
SETTLES_SECONDS = 5.0
"""After an outage, until its effects are over."""
API_SECONDS = (0.01, 0.4, 6.0)
WATCH_SECONDS = (0.0, 0.0, 0.001, 0.02)
"""By one of these a change reaches a registry after it has reached the scheduler."""


class Network:
    """How one process reaches the bus and the API server; the next process of the same name has the same."""

    def __init__(self, bus: MemoryBus, rate: float) -> None:
        self.broker = Broker(bus)
        self.rate = rate
        weather = self.broker.weather
        weather.late = rate
        weather.timeout = rate / 2
        self.api_is_away = False

    @property
    def bus_is_away(self) -> bool:
        return self.broker.weather.away

    def clear(self) -> None:
        """From now on all calls arrive, and so do their answers."""
        self.broker.weather.clear()
        self.rate = 0.0
        self.api_is_away = False


class ClusterWorld:
    """Everything that outlives a process."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.chance = Random(f"cluster-{seed}")
        self.faults = Random(f"cluster-faults-{seed}")
        """For what happens, and for how it goes wrong."""
        self.clock = SimulatedClock(loop)
        self.api = FakeCluster()
        self.bus = MemoryBus()
        self.rate = self.chance.choice(RATES)
        self.division: Division = division_of(seed)
        """How the GPUs of all nodes are offered."""
        self.compat = compat_of(seed, self.division)
        self.hardware = hardware_of(self.division, seed, GPUS[self.division])
        self.networks: dict[str, Network] = {}
        """By the name of the process."""
        self.outages = 0
        """Processes that are dead, stopped or cut off now."""
        self.disturbed_until = -1.0
        """Seconds of the loop up to which there was an outage last."""
        self._outage_seconds = self._outage_began = 0.0
        self.trace: Trace = []
        self.violations: list[Violation] = []
        self.tasks: TaskGroup
        """Runs what belongs to no process: kubelets, and what happens later."""

    def network(self, name: str) -> Network:
        """That of the process with this name."""
        return self.networks.setdefault(name, Network(self.bus, self.rate))

    def note(self, what: str, *details: object) -> None:
        self.trace.append((round(self.loop.time(), 6), self.loop.rounds, what, *details))

    def violate(self, invariant: str, finding: str) -> None:
        """Ends the run at the next step."""
        violation = Violation(invariant, finding)
        self.note("VIOLATION", str(violation))
        self.violations.append(violation)

    def start(self, process: Process, main: Main) -> None:
        """Runs a process. It is a violation if it ends although nobody kills it."""

        def check_end(task: "asyncio.Task[None]") -> None:
            if not process.dead and not task.cancelled():
                self.violate("K0", f"{process.name} ended: {task.exception()!r}")

        self.loop.start(process, main)
        assert process.root is not None
        process.root.add_done_callback(check_end)

    def begin_outage(self) -> None:
        if not self.outages:
            self._outage_began = self.loop.time()
        self.outages += 1

    def end_outage(self) -> None:
        self.outages -= 1
        self.disturbed_until = max(self.disturbed_until, self.loop.time())
        if not self.outages:
            self._outage_seconds += self.loop.time() - self._outage_began

    def clear(self) -> None:
        """From now on all calls arrive. What calls that were late or lost have led to is over like that of an outage."""
        for network in self.networks.values():
            network.clear()
        if self.rate:
            self.disturbed_until = self.loop.time() + SETTLES_SECONDS
        self.rate = 0.0

    def outage_seconds(self) -> float:
        """How long there was an outage so far."""
        return self._outage_seconds + (self.loop.time() - self._outage_began if self.outages else 0.0)

    def is_disturbed_since(self, time: float) -> bool:
        """Whether there was an outage at or after this second of the loop."""
        return self.outages > 0 or self.disturbed_until >= time


class BrokenCall(Exception):
    """Raised for a call to a process that ended before it answered: nobody knows what it did."""


async def call(world: ClusterWorld, process: Process, method: Callable[[], Awaitable[T]]) -> T:
    """Runs a method within another process. It runs on if the caller gives up. Raises BrokenCall."""
    ended, results = anyio.Event(), list[T]()

    async def run() -> None:
        try:
            results.append(await method())
        finally:
            ended.set()

    if process.dead:
        raise BrokenCall(process.name)
    task = world.loop.create_in(process, run)

    def end() -> None:
        task.cancel()
        ended.set()

    process.ended.append(end)
    await ended.wait()
    if not process.dead:
        process.ended.remove(end)
    if not results or process.dead:
        raise BrokenCall(process.name)
    return results[0]


class PartedBus(FaultyBus):
    """The bus of a process that can be cut off: then its questions fail, and those of others wait until it is back."""

    def __init__(self, world: ClusterWorld, process: Process) -> None:
        super().__init__(world.network(process.name).broker, world.faults, lambda: process.dead)

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        found = await super().newest(stream, subject)
        if happens(self._weather.late, self._chance):  # others write while the answer is on its way
            await anyio.sleep(self._chance.choice(LATE_SECONDS))
        return found

    @asynccontextmanager
    async def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
        parted = [msgspec.structs.replace(each, answer=self._when_back(each.answer)) for each in endpoints]
        async with super().serve(service, parted):
            yield

    def _when_back(self, answer: Answer) -> Answer:
        async def answered(body: bytes) -> bytes:
            while not self.connected:  # noqa: ASYNC110  # weather is data that a scenario changes
                await anyio.sleep(AWAY_SECONDS)
            return await answer(body)

        return answered


class FaultyApi(MemoryKubernetes):
    """The API server as one registry reaches it: answers are late or lost, and the watch is behind that of the scheduler."""

    def __init__(self, world: ClusterWorld, process: Process) -> None:
        super().__init__(world.api)
        self._world = world
        self._process = process
        self._network = world.network(process.name)
        self._chance = world.faults

    async def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        async for each in super().pods():
            await anyio.sleep(self._chance.choice(WATCH_SECONDS))
            while self._network.api_is_away:  # noqa: ASYNC110  # the network is data that a scenario changes
                await anyio.sleep(AWAY_SECONDS)
            yield each

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        await self._reach()
        await super().bind(namespace, name, uid, node)
        await self._reach()

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        await self._reach()
        seen = await super().pod(namespace, name)
        await self._reach()
        return seen

    async def wake(self, node: NodeName, text: str) -> None:
        await self._reach()
        self._world.note("wake", node, text)
        await super().wake(node, text)

    async def _reach(self) -> None:
        """The way there, or back."""
        if happens(self._network.rate, self._chance):
            await anyio.sleep(self._chance.choice(API_SECONDS))
        if self._process.dead:
            await anyio.sleep_forever()
        if self._network.api_is_away or happens(self._network.rate / 2, self._chance):
            raise ApiUnavailable("no answer")
