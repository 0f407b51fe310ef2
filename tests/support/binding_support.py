"""Nodes with real allocators, an API server in memory, and registries that bind pods."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import anyio
from api_server_support import shown_pod
from decision_support import machine, node
from device_allocations_support import ledger_of

from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.core.admission.admit import admit
from topoalign.core.admission.gang_plan import GangPlacement
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import NotFound
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import with_reserved
from topoalign.registry.ports import KubernetesApi, PodEvent, SeenPod
from topoalign.registry.scheduling.binding.binding import BindChecks, PodBinder
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedPods
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.clock import SystemClock
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

RULES = AdmissionRules()


class Site:
    """A cluster: its nodes by name, each with 4 GPUs (2 on each of two NUMA nodes), and what the API server has."""

    def __init__(
        self,
        names: Sequence[str] = ("node-1", "node-2"),
        clock: Clock | None = None,
        hardware: Topology | None = None,
    ) -> None:
        self.cluster = FakeCluster()
        clock, hardware = clock or SystemClock(), hardware or machine()
        nodes = [node(hardware, name=NodeName(name)) for name in names]
        self.ledgers = {each.node: ledger_of(each, clock) for each in nodes}

    def facts(self, name: NodeName) -> NodeState:
        if name not in self.ledgers:
            raise NotFound("node", name, "")
        return self.ledgers[name].state

    def add(
        self,
        name: str,
        gpus: int = 1,
        annotations: Mapping[str, str] = {},
        limits: Mapping[ResourceName, int] = {},
    ) -> str:
        """A pod that waits; its UID. `limits`: what it asks for instead of GPUs."""
        shown = shown_pod(name, gpus=gpus)
        if limits:
            asked = {resource: str(amount) for resource, amount in limits.items()}
            shown["spec"]["containers"][0]["resources"] = {"limits": asked, "requests": asked}
        shown["metadata"]["annotations"] |= annotations
        return str(self.cluster.add_pod(shown)["metadata"]["uid"])

    def node_of(self, name: str) -> str:
        """Where the pod is bound; empty: nowhere."""
        return str(self.cluster.pods.get(("ml", name))["spec"].get("nodeName", ""))

    @asynccontextmanager
    async def serving(
        self,
        bus: Bus,
        rules: AdmissionRules = RULES,
    ) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in self.ledgers.values():
                admissions = Admissions(
                    each,
                    bus,
                    rules,
                    kubelet_owns_devices=False,
                    predictions=Predictions(each, rules, None, kubelet_owns_devices=False),
                )
                await stack.enter_async_context(bus.serve("topoalign-allocator", admissions.endpoints()))
            yield


async def always(node: NodeName, pod: PodToSchedule) -> str:
    return ""


class ScriptedChecks(BindChecks):
    """What a registry knows of its nodes at a bind, as a test sets it. It is its own view."""

    view: Any

    def __init__(self, fits: Callable[[NodeName, PodToSchedule], Awaitable[str]] = always) -> None:
        self.view = self
        self._fits = fits
        self.ended: tuple[str, ...] = ()
        """UIDs of terminated pods."""
        self.version = 0
        self.changed = anyio.Event()
        self.foreign = lambda node: ""

    def check_placement(self, pod: SeenPod, node: NodeName) -> None:
        pass

    def passes(self, node: NodeName, pod: PodToSchedule) -> bool:
        return False

    def claim(self, pod: PodToSchedule, node: NodeName) -> AbstractContextManager[object]:
        return nullcontext()

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        pass

    def unassume(self, node: NodeName, uid: str) -> None:
        pass

    async def fits(self, node: NodeName, pod: PodToSchedule) -> str:
        return await self._fits(node, pod)

    def terminated(self, node: NodeName) -> tuple[str, ...]:
        return self.ended

    def is_being_freed(self, node: NodeName, pod: PodToSchedule) -> bool:
        return bool(self.ended)

    def version_of(self, node: NodeName) -> int:
        return self.version

    async def until_changed(self, node: NodeName, version: int) -> None:
        while self.version == version:
            await self.changed.wait()

    def change(self) -> None:
        self.version += 1
        self.changed.set()
        self.changed = anyio.Event()


class Registry:
    """One replica of the registry, as far as it binds."""

    def __init__(
        self,
        site: Site,
        bus: Bus,
        writer: str = "r1",
        api: KubernetesApi | None = None,
        fits: Callable[[NodeName, PodToSchedule], Awaitable[str]] = always,
        clock: Clock | None = None,
    ) -> None:
        self.site, self.api = site, api or MemoryKubernetes(site.cluster)
        self.reservations = ClusterReservations(bus, clock or SystemClock(), writer, site.facts)
        self.gangs = Gangs(self.reservations, SystemClock(), self.hardware, self.candidate)
        self.shown = ReportedPods()
        self.checks = ScriptedChecks(fits)
        self.events: list[PodEvent] = []
        self.binder = PodBinder(
            bus,
            clock or SystemClock(),
            self.api,
            self.reservations,
            self.checks,
            self.plan,
            self.shown,
            self.events.append,
        )

    async def plan(self, pod: PodToSchedule, node: NodeName) -> str:
        return await self.gangs.plan(self.passing, pod, node)

    async def passing(self, pod: PodToSchedule, chosen: NodeName | None = None) -> list[NodeName]:
        """Nodes that would admit the pod, as the view has it."""
        held = {name: self.candidate(name) for name in self.site.ledgers}
        return [name for name, at in held.items() if isinstance(admit(at.state, pod.request, RULES), Admission)]

    def hardware(self, name: NodeName) -> Topology:
        return self.site.facts(name).hardware

    def candidate(self, name: NodeName) -> GangPlacement:
        facts = self.site.facts(name)
        return GangPlacement(with_reserved(facts, facts, self.reservations.held(name)), RULES)

    async def see(self, *pods: str) -> None:
        """The watch reports these pods."""
        await self.show(*pods)
        for name in pods:
            seen = await self.api.pod("ml", name)
            assert seen is not None
            self.gangs.see(seen)

    async def show(self, *pods: str) -> None:
        """The watch reports these pods, but no gangs."""
        for name in pods:
            seen = await MemoryKubernetes(self.site.cluster).pod("ml", name)
            assert seen is not None
            if seen.node is None:
                self.shown.wait(seen)
            else:
                self.shown.bind(seen.uid, seen.node)

    async def bind(self, pod: str, uid: str, to: str = "node-1") -> None:
        await self.binder.bind("ml", pod, uid, NodeName(to))

    def reserved(self, name: str = "node-1") -> dict[str, list[str]]:
        """Pod -> the devices that are reserved for it on the node."""
        return {
            each.pod: sorted(device for one in each.containers for ids in one.devices.values() for device in ids)
            for each in self.reservations.held(NodeName(name))
        }


@asynccontextmanager
async def running(site: Site, bus: Bus, *registries: Registry, rules: AdmissionRules = RULES) -> AsyncIterator[None]:
    async with site.serving(bus, rules), anyio.create_task_group() as tasks:
        for each in registries:
            tasks.start_soon(each.reservations.run)
        await all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()
