"""
Pods, rules and machines by chance; a plugin of somebody else's devices; and a listener that knows a node by its events.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import anyio
from anyio.abc import TaskGroup
from kubelet_support import two_nodes

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.allocator.reconciliation.usage_publisher import UsagePublisher
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.events import Event
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodLevelResources, PodRequest
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import call_once
from topoalign.kubelet.grpc.plugin_api import API_VERSION, KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.machines import catalogue
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.memory_bus import MemoryBus

FPGA = ResourceName("example.com/fpga")
GIB = 1 << 30
PATIENT_SECONDS = 60.0
"""For a kubelet that answers slowly because the machine is busy: what is not answered in time is not predicted."""
MACHINES = (two_nodes(gpus=8, nics=4), catalogue.machine("hgx-h100"), catalogue.machine("epyc-nps4-4gpu"))
POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
OPTIONS: tuple[Mapping[str, str], ...] = (
    {},
    {"full-pcpus-only": "true"},
    {"strict-cpu-reservation": "true"},
    {"distribute-cpus-across-numa": "true"},
)
CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: {policy}
topologyManagerScope: {scope}
cpuManagerPolicy: static
cpuManagerPolicyOptions: {{{options}}}
reservedSystemCPUs: "0"
memoryManagerPolicy: Static
reservedMemory: [{{numaNode: 0, limits: {{memory: 2Gi}}}}]
"""


def configured(chance: Random) -> str:
    options = ", ".join(f'{name}: "{value}"' for name, value in chance.choice(OPTIONS).items())
    return CONFIG.format(policy=chance.choice(POLICIES), scope=chance.choice(["container", "pod"]), options=options)


def some_container(chance: Random, name: str, sidecar: bool = False, fpgas: float = 0.0) -> ContainerRequest:
    """`fpgas`: how likely it asks for devices of another plugin."""
    amounts = {
        resource: chance.choice(sizes)
        for resource, sizes, share in ((GPU, (1, 1, 2, 3, 4), 0.8), (NIC, (1, 2), 0.5), (FPGA, (1, 2, 3), fpgas))
        if share and chance.random() < share
    }
    if chance.random() < 0.85:
        amounts |= {CPU: chance.choice((1000, 1500, 2000, 4000, 8000)), MEMORY: chance.choice((1, 4, 20, 70)) * GIB}
    return ContainerRequest(name=ContainerName(name), requests=amounts, limits=amounts, sidecar=sidecar)


WHOLE = {CPU: 64_000, MEMORY: 512 * GIB}


def some_pod(chance: Random, name: str, fpgas: float = 0.0, whole: bool = False) -> PodRequest:
    """`fpgas` as in `some_container`; `whole`: with pod-level resources, by which it is Guaranteed."""
    return PodRequest(
        name=PodName(name),
        init_containers=tuple(
            some_container(chance, f"init-{i}", chance.random() < 0.4, fpgas)
            for i in range(chance.choice((0, 0, 0, 1, 2)))
        ),
        containers=tuple(some_container(chance, f"main-{i}", fpgas=fpgas) for i in range(chance.choice((1, 1, 2)))),
        resources=PodLevelResources(requests=WHOLE, limits=WHOLE) if whole else PodLevelResources(),
    )


def told(decision: Decision) -> object:
    """Who gets what, or the kubelet's word for why not."""
    if not isinstance(decision, Admission):
        return decision.reason, decision.container
    return [(got.owner, got.role, got.device_ids, got.cpus, got.memory) for got in decision.allocations]


class OtherPlugin(Servicer, v1beta1.DevicePluginBase):
    """Lists these devices with their NUMA nodes, gives out whatever is asked for, and has no preference."""

    def __init__(self, devices: Mapping[str, tuple[int, ...]], resource: ResourceName = FPGA) -> None:
        self.devices, self.resource = dict(devices), resource
        self._changed, self._ending = anyio.Event(), False

    def change(self, devices: Mapping[str, tuple[int, ...]]) -> None:
        """Lists other devices from now on."""
        self.devices = dict(devices)
        self._changed.set()

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        return v1beta1.DevicePluginOptions()

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        while not self._ending:
            self._changed = anyio.Event()
            yield v1beta1.ListAndWatchResponse(
                devices=[
                    v1beta1.Device(
                        id=name,
                        health="Healthy",
                        topology=v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=node) for node in nodes]),
                    )
                    for name, nodes in self.devices.items()
                ]
            )
            await self._changed.wait()

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        answers = [v1beta1.ContainerAllocateResponse() for _ in message.container_requests]
        return v1beta1.AllocateResponse(container_responses=answers)

    @asynccontextmanager
    async def running(self, directory: Path) -> AsyncIterator[None]:
        """Serves, registered with the kubelet of this plugin directory."""
        server = GrpcServer(self, directory / "other.sock", "directory")
        await server.listen()
        request = v1beta1.RegisterRequest(version=API_VERSION, endpoint="other.sock", resource_name=self.resource)
        await call_once(
            directory / KUBELET_SOCKET,
            lambda channel: v1beta1.RegistrationStub(channel).register(request),
            SystemClock(),
            10,
        )
        try:
            yield
        finally:
            self._ending = True
            self._changed.set()
            await server.stop(1.0)


class Listener:
    """Knows of a node what its events tell, and nothing else."""

    def __init__(self, bus: MemoryBus, ledger: Ledger) -> None:
        """`ledger`: of the node, whose state is waited for but not looked into."""
        self.state = NodeState(node=ledger.node)
        self._bus, self._ledger = bus, ledger
        self._client = Client(bus)
        self._heard = anyio.Event()

    async def hear_nodes(self) -> None:
        async with aclosing(self._client.nodes(node=self.state.node)) as events:
            async for delivery in events:
                self._apply(delivery.event)

    async def hear_allocations(self) -> None:
        async with aclosing(self._client.allocations(since=0, node=self.state.node)) as events:
            async for delivery in events:
                self._apply(delivery.event)

    def _apply(self, event: Event) -> None:
        self.state = self.state.apply(event)
        self._heard.set()
        self._heard = anyio.Event()

    async def caught_up(self) -> None:
        """Returns when it has received all that the node has said."""
        while place(self.state) != place(self._ledger.state):
            await self._heard.wait()


def place(state: NodeState) -> tuple[int, ...]:
    """How far the facts of a node are known."""
    readings = [each for each in (state.topology, state.health, state.usage) if each is not None]
    return (state.epoch, state.seq, *(number for each in readings for number in (each.epoch, each.revision)))


async def listening(ledger: Ledger, clock: Clock, tasks: TaskGroup) -> Listener:
    """A listener of a node that says what its ledger has, from now on."""
    bus = MemoryBus()
    for reading in (ledger.state.topology, ledger.state.health):
        assert reading is not None
        await bus.publish(wire.encode_event(reading, clock.wall()))
    tasks.start_soon(Outbox(ledger, bus, clock).run)
    tasks.start_soon(UsagePublisher(ledger, bus, clock, bus).run)
    listener = Listener(bus, ledger)
    tasks.start_soon(listener.hear_nodes)
    tasks.start_soon(listener.hear_allocations)
    return listener
