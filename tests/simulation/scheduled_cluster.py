"""
A cluster in virtual time: a scheduler, an API server, registries with their extenders, and nodes that lag as real ones do.

Product code are the registries, from the messages of the bus to the answers of the extender. Stand-ins are the scheduler,
the API server, whose watch reaches a registry a moment after the scheduler, and the nodes, whose kubelets admit pods late
and whose facts show the end of pods later still (`tools.bench.schedule.node`). All delays pass in the virtual time of
`simulation.loop`: nothing here waits for real.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import anyio
import msgspec
from simulation.kubelets import Kubelets
from simulation.loop import SimulatedLoop
from simulation.world import SimulatedClock

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import ConfirmRequest, NodeRequest
from topoalign.core.ports import Bus, Clock, Endpoint, Stream
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.ports import GoneObject, KubernetesApi, SeenPod, Synced
from topoalign.registry.scheduling.extender.handlers import Extender
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_scheduler.extender import ExtenderFailed
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.testing.memory_kubernetes import MemoryKubernetes
from topoalign.tools.bench.filter.cluster import BusyNode, Kind
from topoalign.tools.bench.registry.allocators import standing
from topoalign.tools.bench.schedule.control_plane import register
from topoalign.tools.bench.schedule.node import AS_RECORDED, Delays, Node

WATCH_SECONDS = (0.0, 0.0, 0.001, 0.02)
"""By one of these a change reaches a registry after it has reached the scheduler."""
CALL_SECONDS = (0.0005, 0.003)
"""Between which two a call of the extender takes on its way."""
CYCLE_SECONDS = 0.017
"""What a kube-scheduler needs for a pod beside its extender."""
READY_SECONDS = 60.0
GPU = "nvidia.com/gpu"


class LateWatch(MemoryKubernetes):
    """The API server as a registry sees it: a moment later than the scheduler does."""

    def __init__(self, cluster: FakeCluster, chance: Random) -> None:
        super().__init__(cluster)
        self._chance = chance

    async def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        async for each in super().pods():
            await anyio.sleep(self._chance.choice(WATCH_SECONDS))
            yield each


class Replica:
    """One registry."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        api: KubernetesApi,
        name: str,
        scheduling: type[SchedulingService] = SchedulingService,
    ) -> None:
        settings = RegistrySettings(scheduler_port=0)
        context = Context(bus=bus, clock=clock, environment={})
        client = Client(bus, clock, "registry", usage=True)
        self.members = Cluster(usage=True)
        self.registry = Registry(bus, clock, client, self.members, RegistryMetrics(context.metrics, client), settings)
        self.scheduling = scheduling(context, settings, client, self.members, self.registry, api, name)
        self.extender = Extender(self.scheduling.scheduler, self.scheduling.bind, lambda: (1, 36))


class ServiceOfReplicas:
    """
    The extender as the scheduler reaches it: a Service whose endpoints are the registries that are ready, with
    `sessionAffinity: ClientIP`: the same one as long as it is ready.
    """

    def __init__(self, cluster: "ScheduledCluster") -> None:
        self._cluster = cluster
        self._chosen: Replica | None = None

    async def ask(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        chance = self._cluster.chance
        await anyio.sleep(chance.uniform(*CALL_SECONDS))
        ready = [each for each in self._cluster.replicas if each.scheduling.behind() is None]
        if not ready:
            raise ExtenderFailed("the Service has no endpoints")
        if self._chosen not in ready:
            self._chosen = chance.choice(ready)
        answer = getattr(self._chosen.extender, verb)
        return msgspec.json.decode(await answer(msgspec.json.encode(arguments)))


class ScheduledCluster(Kubelets[Node]):
    """All of a run."""

    def __init__(
        self,
        loop: SimulatedLoop,
        seed: int,
        kinds: Sequence[Kind],
        held: int,
        *,
        registries: int = 2,
        delays: Delays = AS_RECORDED,
        extended: bool = True,
    ) -> None:
        """
        `kinds`: of each node. `held`: GPUs of each node that pods with one GPU and priority 0 hold at first. `extended`: the
        scheduler has our extender.
        """
        chance, self.clock = Random(f"cluster-{seed}"), SimulatedClock(loop)
        made = [
            Node(partial(BusyNode, number, held, kinds=kinds), self.clock, delays, chance)
            for number in range(len(kinds))
        ]
        super().__init__(loop, FakeCluster(), MemoryBus(), chance, {each.busy.node: each for each in made})
        watch = LateWatch(self.api, chance)
        self.replicas = [Replica(self.bus, self.clock, watch, f"r{number}") for number in range(registries)]
        self.scheduler = FakeScheduler(
            self.api,
            ServiceOfReplicas(self) if extended else None,
            self.clock,
            seed=seed,
            cycle_seconds=CYCLE_SECONDS,
        )

    async def run(self, load: Any) -> None:
        """Runs the cluster while `load`, a function without arguments, does its work."""
        for node in self.nodes.values():
            register(self.api, node.busy)
            for event in node.busy.said():
                await self.bus.publish(wire.encode_event(event, self.clock.wall()))
            assert node.facts is not None
        async with anyio.create_task_group() as tasks, self.bus.serve("topoalign-allocator", self._endpoints()):
            for each in self.replicas:
                await tasks.start(each.scheduling.follow)
                await tasks.start(each.registry.run)
            with anyio.fail_after(READY_SECONDS):
                await self.until(lambda: not any(each.scheduling.behind() for each in self.replicas))
            tasks.start_soon(self.follow_pods, tasks)
            tasks.start_soon(self._follow_reservations)
            await tasks.start(self.scheduler.run)
            await load()
            tasks.cancel_scope.cancel()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Until this is so, which is looked at every tenth of a second."""
        while not is_so():  # noqa: ASYNC110  # virtual time costs nothing
            await anyio.sleep(0.1)

    def _endpoints(self) -> list[Endpoint]:
        async def alive(request: NodeRequest) -> Any:
            return standing(self.nodes[request.node].busy)

        async def confirm(request: ConfirmRequest) -> Any:
            await anyio.sleep(self.chance.uniform(0.002, 0.008))
            return self.nodes[request.node].confirm(request)

        return [
            Endpoint(name="alive", subject=anywhere("alive"), answer=answer_with(NodeRequest, alive)),
            Endpoint(name="confirm", subject=anywhere("confirm"), answer=answer_with(ConfirmRequest, confirm)),
        ]

    def create(self, name: str, gpus: int, *, priority: int = 0, cpus: int = 0, seconds: float | None = None) -> None:
        """A pod that asks for GPUs, and for CPUs and memory of its own where it asks for CPUs."""
        limits = {GPU: str(gpus)}
        if cpus:
            limits |= {"cpu": str(cpus), "memory": f"{4 * cpus}Gi"}
        container = {"name": "main", "image": "none", "resources": {"limits": limits, "requests": limits}}
        if seconds is not None:
            self.seconds[name] = seconds
        self.api.add_pod({"metadata": {"name": name}, "spec": {"priority": priority, "containers": [container]}})

    async def _follow_reservations(self) -> None:
        async with self.bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                assert isinstance(event, ReservationsChanged)
                self.nodes[event.node].reserve(event, received.position)


def anywhere(verb: str) -> str:
    """Subject of a request to any node's allocator."""
    return wire.admission_subject(NodeName("node"), verb).replace(".node.", ".*.")
