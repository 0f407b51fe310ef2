"""The registries of the simulated cluster, each a process, and how the scheduler reaches them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
import msgspec
from simulation.bus import happens
from simulation.cluster_world import BrokenCall, ClusterWorld, FaultyApi, PartedBus, call
from simulation.loop import Process
from simulation.scheduled_cluster import CALL_SECONDS, Replica

from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.fake_scheduler.extender import ExtenderFailed

LATE_SECONDS = (0.1, 1.0, 6.0)
"""By one of these a call of the scheduler is late. It gives up after five."""


class WatchedScheduling(SchedulingService):
    """Reports which message of a node's reservations it has after each change."""

    moved: Callable[[NodeName, int], None]

    def _hold(self, node: NodeName) -> None:
        super()._hold(node)
        self.moved(node, self.reservations.of(node).position)


class Registry:
    """One registry. `start` begins it, anew if it has ended."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world = world
        self.name = name
        self._lives = 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        self._positions: dict[NodeName, int] = {}
        world, process = self.world, Process(self.name)
        self.process = process
        self.replica = Replica(
            PartedBus(world, process),
            world.clock,
            FaultyApi(world, process),
            f"{self.name}-{self._lives}",
            WatchedScheduling,
        )
        assert isinstance(self.replica.scheduling, WatchedScheduling)
        self.replica.scheduling.moved = partial(self._check_position, process)
        world.start(process, self._run)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.replica.scheduling.follow)
            await tasks.start(self.replica.registry.run)

    @property
    def is_ready(self) -> bool:
        """Whether the Service has it as an endpoint: its probe answers, and is ready."""
        return not self.process.dead and self.replica.scheduling.unread_nodes() is None

    def _check_position(self, process: Process, node: NodeName, position: int) -> None:
        if process.dead:
            return
        before = self._positions.get(node, 0)
        if position < before:
            self.world.violate("K5", f"{self.name} goes back from message {before} to {position} of {node}")
        self._positions[node] = position


class Service:
    """
    The extender as the scheduler reaches it, by a Service whose endpoints are the registries that are ready. Half of the
    clusters have `sessionAffinity: ClientIP`: the same one as long as it is ready. Answers are late or lost.
    """

    def __init__(self, world: ClusterWorld, registries: list[Registry]) -> None:
        self._world = world
        self._registries = registries
        self.has_affinity = world.chance.random() < 0.5
        self._chosen: Registry | None = None

    async def ask(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """As `Extender`. Raises ExtenderFailed."""
        world = self._world
        await anyio.sleep(world.faults.uniform(*CALL_SECONDS))
        ready = [each for each in self._registries if each.is_ready]
        if not ready:
            raise ExtenderFailed("the Service has no endpoints")
        if self._chosen not in ready or not self.has_affinity:
            self._chosen = world.faults.choice(ready)
        chosen = self._chosen
        assert chosen is not None
        rate = world.network("scheduler").rate
        if happens(rate, world.faults):
            await anyio.sleep(world.faults.choice(LATE_SECONDS))
        method, body = getattr(chosen.replica.extender, verb), msgspec.json.encode(arguments)
        try:
            answer: bytes = await call(world, chosen.process, lambda: method(body))
            world.note(verb, name_of(arguments), chosen.name, answer)
        except BrokenCall as error:
            raise ExtenderFailed(f"failed {verb}: the connection broke") from error
        if happens(rate / 2, world.faults):
            raise ExtenderFailed(f"failed {verb}: the answer is lost")
        return msgspec.json.decode(answer)


def name_of(arguments: Mapping[str, Any]) -> str:
    """Of the pod that the scheduler asks about."""
    return str(arguments["PodName"] if "PodName" in arguments else arguments["Pod"]["metadata"]["name"])
