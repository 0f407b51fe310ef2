"""
A node that predicts from the files of its kubelet; a plugin of somebody else's devices; a listener that knows the node by
its events.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from kubelet_support import serving
from outage_support import Listener
from share_support import Node

from topoalign.allocator.ledger.outbox import Outbox
from topoalign.allocator.reconciliation.usage_publisher import UsagePublisher
from topoalign.allocator.requests.admissions import Predictions
from topoalign.allocator.requests.kubelet_files import POLL_SECONDS, KubeletFiles, KubeletWatch
from topoalign.core import wire
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Decision
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.model.requests import (
    AdmissionRules,
    Placement,
    PodRequest,
    Policy,
)
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import kubelet_configuration
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import call_once
from topoalign.kubelet.grpc.plugin_api import API_VERSION, KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import Servicer
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

FPGA = ResourceName("example.com/fpga")
PATIENT_SECONDS = 60.0
"""For a kubelet that answers slowly because the machine is busy: what is not answered in time is not predicted."""
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


class FpgaPlugin(Servicer, v1beta1.DevicePluginBase):
    """Lists these devices with their NUMA nodes, gives out whatever is asked for, and has no preference."""

    def __init__(self, devices: Mapping[str, tuple[int, ...]]) -> None:
        self.devices = devices
        self._changed = anyio.Event()

    def change(self, devices: Mapping[str, tuple[int, ...]]) -> None:
        self.devices = devices
        self._changed.set()

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        return v1beta1.DevicePluginOptions()

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        while True:
            self._changed = anyio.Event()
            near = {
                name: v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=node) for node in nodes])
                for name, nodes in self.devices.items()
            }
            devices = [v1beta1.Device(id=name, health="Healthy", topology=at) for name, at in near.items()]
            yield v1beta1.ListAndWatchResponse(devices=devices)
            await self._changed.wait()

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        answers = [v1beta1.ContainerAllocateResponse() for _ in message.container_requests]
        return v1beta1.AllocateResponse(container_responses=answers)


@asynccontextmanager
async def fpga_plugin(directory: Path, devices: Mapping[str, tuple[int, ...]]) -> AsyncIterator[FpgaPlugin]:
    """A plugin of somebody else, registered with the kubelet of this plugin directory."""
    plugin = FpgaPlugin(devices)
    async with serving(plugin, directory=directory) as server:
        request = v1beta1.RegisterRequest(version=API_VERSION, endpoint=server.path.name, resource_name=FPGA)
        await call_once(
            directory / KUBELET_SOCKET,
            lambda channel: v1beta1.RegistrationStub(channel).register(request),
            SystemClock(),
            10,
        )
        yield plugin


class CountedWatch(KubeletWatch):
    polls = 0
    polled = anyio.Event()

    async def poll(self) -> None:
        await super().poll()
        self.polls += 1
        self.polled.set()
        self.polled = anyio.Event()


class PredictingNode(Node):
    """Its kubelet has a configuration file, its agent polls the kubelet's files, and a listener receives its events."""

    watch: CountedWatch
    predictions: Predictions
    listener: Listener

    def __init__(
        self, directory: Path, machine: Topology, config: str, placement: Placement = Placement.TOPOLOGY
    ) -> None:
        super().__init__(directory, Policy.NONE, machine)
        self.directory, self.config = directory, directory / "config.yaml"
        self.config.write_text(config)
        self.rules, self.changes = AdmissionRules(placement=placement), DirectoryChanges()
        rules = kubelet_configuration.load_configuration(self.config, placement)
        self.kubelet = FakeKubelet(self.plugins, self.resources, machine, rules)

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        await super().start_agent(tasks, machine)
        files = KubeletFiles(self.config, self.directory, self.rules, PATIENT_SECONDS)
        devices, ended = self.pod_resources.devices, self.allocations.ended
        self.watch = CountedWatch(self.ledger, files, self.clock, devices, ended, self.changes)
        self.predictions = Predictions(self.ledger, self.rules, self.watch, kubelet_owns_devices=True)
        bus = MemoryBus()
        for reading in (self.ledger.state.topology, self.ledger.state.health):
            assert reading is not None
            await bus.publish(wire.encode_event(reading, self.clock.wall()))
        self.listener = Listener(bus, self.ledger.node)
        outbox = Outbox(self.ledger, bus, self.clock)
        usage = UsagePublisher(self.ledger, bus, self.clock, bus)
        for run in (outbox.run, usage.run, self.listener.listen_to_readings, self.listener.listen):
            tasks.start_soon(run)

    async def next_poll(self, seconds: float = POLL_SECONDS) -> KubeletObserved:
        """What the listener knows of the kubelet when so much time has passed and the watch has polled."""
        seen = self.watch.polls
        await self.clock.advance(seconds)
        while self.watch.polls == seen:
            await self.watch.polled.wait()
        await self.listener.agrees_with(self.ledger)
        return self.known

    @property
    def known(self) -> KubeletObserved:
        """What the listener knows of the kubelet."""
        usage = self.listener.state.usage
        assert usage is not None and usage.kubelet is not None
        return usage.kubelet

    def predicted(self, asked: PodRequest) -> Decision:
        """What the listener predicts for a pod."""
        return predict(self.listener.state, asked, self.clock.wall(), explain=True)
