"""A registry with its scheduler's side, on a bus with nodes that speak and answer, and its watch of an API server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from decision_support import machine
from view_support import NODE, RULES, TIME, Says

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.admission.prediction import predict
from topoalign.core.model.events import Event
from topoalign.core.model.requests import ConfirmRequest, WriterPosition
from topoalign.core.ports import Clock, Endpoint
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.ports import KubernetesApi
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedNodes, ReportedPods
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.cluster_watch import KubernetesRecords, KubernetesWatch
from topoalign.registry.scheduling.kubernetes.pod_events import EventWriter
from topoalign.registry.scheduling.kubernetes.requeue import Requeue
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes


class World:
    """A bus, nodes that speak and answer on it, and a registry with its scheduler's side."""

    def __init__(self, api: KubernetesApi | None = None, bus: MemoryBus | None = None) -> None:
        """`api`: the API server, of a cluster of its own; None: one without trouble. `bus`: None: one in memory."""
        self.bus = bus or MemoryBus()
        self.clock = ManualClock()
        self.says = Says(NODE, machine(), RULES)
        self.kubernetes = FakeCluster()
        self.api = api or MemoryKubernetes(self.kubernetes)
        self.settings = RegistrySettings(scheduler_port=0)
        self.context = Context(bus=self.bus, clock=self.clock, environment={})

    async def say(self, *events: Event) -> None:
        for event in events:
            await self.bus.publish(wire.encode_event(event, TIME))
        await all_tasks_blocked()

    @asynccontextmanager
    async def allocator(self, says: Says) -> AsyncIterator[None]:
        """Answers for a node whether it is alive and what it would give a pod; says a snapshot when it is asked for one."""

        async def alive(body: bytes) -> bytes:
            state = says.state
            return wire.encode_answer(WriterPosition(epoch=state.epoch, seq=state.seq, digest=state.digest))

        async def snapshot(body: bytes) -> bytes:
            await self.bus.publish(wire.encode_event(says.snapshot(), TIME))
            return wire.encode_answer((says.state.epoch, says.state.seq))

        async def confirm(body: bytes) -> bytes:
            request = msgspec.json.decode(body, type=ConfirmRequest)
            return wire.encode_answer(predict(says.state, request.pod, TIME, reserved=request.reserved))

        endpoints = [
            Endpoint(name=verb, subject=wire.admission_subject(says.node, verb), answer=answer)
            for verb, answer in (("alive", alive), ("snapshot", snapshot), ("confirm", confirm))
        ]
        async with self.bus.serve("topoalign-allocator", endpoints):
            yield

    @asynccontextmanager
    async def registry(self) -> AsyncIterator[tuple[SchedulingService, str]]:
        """With the URL of its extender."""
        settings = self.settings
        client, cluster = Client(self.bus, self.clock, "registry", usage=True), Cluster(usage=True)
        metrics = RegistryMetrics(self.context.metrics, client)
        registry = Registry(self.bus, self.clock, client, cluster, metrics, settings)
        scheduling = SchedulingService(self.context, settings, client, cluster, registry, self.api, "r1")
        async with background() as tasks:
            url: str = await tasks.start(lambda *, task_status: scheduling.run(task_status=task_status))
            await tasks.start(lambda *, task_status: registry.run(task_status=task_status))
            await all_tasks_blocked()
            yield scheduling, url

    async def rounds(self, times: int = 1) -> None:
        """The registry asks all allocators so often."""
        for _ in range(times):
            await self.clock.advance(11)
            await all_tasks_blocked()


def watch_of(
    api: KubernetesApi,
    clock: Clock,
    view: ClusterView,
    reservations: ClusterReservations,
    gangs: Gangs | None = None,
    *,
    delete_refused: bool = False,
) -> KubernetesWatch:
    """`gangs`: None: of reservations that nobody makes."""
    if gangs is None:
        none = ClusterReservations(MemoryBus(), clock, "r1", view.facts)
        gangs = Gangs(none, clock, lambda node: view.facts(node).hardware, lambda node: None)
    pods = ReportedPods()
    nodes = ReportedNodes(Cluster())
    reports = EventWriter(clock)
    records = KubernetesRecords(
        pods=pods,
        nodes=nodes,
        foreign=ForeignNodes(clock),
        gangs=gangs,
        quotas=Quotas(view.offers, dict),
        bypassed=BypassedPods(clock, reports.submit, lambda node: (), lambda: None, ""),
    )
    requeue = Requeue(clock, pods.waiting, nodes.uids)
    return KubernetesWatch(api, clock, view, reservations, records, requeue, reports, delete_refused=delete_refused)
