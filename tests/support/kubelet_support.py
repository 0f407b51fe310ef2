"""What the tests of the kubelet front share: a small node, an allocator in memory, and directories that sockets fit into."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import msgspec
from anyio.abc import TaskGroup
from decision_support import container
from decision_support import pod as pod_of
from device_allocations_support import start_allocations
from fact_support import HEALTHY, discovered, judged
from grpclib.client import Channel

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import AskedDevices, KubeletListing
from topoalign.core.model.errors import DeviceInUse, InvalidField, TopoalignError, UnknownDevice
from topoalign.core.model.events import Allocation, DeviceHealth
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    DeviceID,
    NodeName,
    ResourceName,
)
from topoalign.core.model.requests import AdmissionRules, PodRequest, Policy
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import KeptChannel, KubeletAway
from topoalign.kubelet.grpc.transport import GrpcServer, Load
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

NODE = NodeName("node-1")
GIB = 2**30
MEMORY_DISK = Path("/dev/shm")


def two_nodes(gpus: int = 8, nics: int = 2, verbs: bool = True) -> Topology:
    """Two NUMA nodes with 16 CPUs (8 cores) and 64 GiB each; GPUs and NICs are divided between them in order."""
    return Topology(
        cpus=tuple(Cpu(id=i, core=i // 2 * 2, socket=i // 16, node=i // 16, uncore=i // 16) for i in range(32)),
        nodes=(NumaNode(id=0, memory=64 * GIB), NumaNode(id=1, memory=64 * GIB)),
        distances=((10, 21), (21, 10)),
        gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, minor=i, numa_affinity=(i * 2 // gpus,)) for i in range(gpus)),
        nics=tuple(
            Nic(
                id=DeviceID(f"mlx5_{i}"),
                index=i,
                numa_affinity=(i * 2 // nics,),
                verbs=f"uverbs{i}" if verbs else None,
            )
            for i in range(nics)
        ),
    )


class MemoryAllocator:
    """An allocator that keeps its record in memory and prefers the first devices it is offered."""

    def __init__(self, machine: Topology | None) -> None:
        self.state = NodeState(node=NODE)
        self.version = 0
        self.starting: list[tuple[DeviceID, ...]] = []
        """The devices of containers that were about to start."""
        self.fault: TopoalignError | None = None
        self.faults: dict[DeviceID, str] = {}
        self.pause: anyio.Event | None = None
        self.started = anyio.Event()
        self._more = anyio.Event()
        if machine is not None:
            self.discover(machine)

    def discover(self, machine: Topology) -> None:
        revision = self.state.topology.revision + 1 if self.state.topology is not None else 1
        self._become(self.state.apply(discovered(machine, NODE, revision)))
        self.judge(dict.fromkeys((*machine.gpu_by_id, *machine.nic_by_id), HEALTHY))

    def judge(self, health: dict[DeviceID, DeviceHealth]) -> None:
        """Changes the health of these devices."""
        before = self.state.health
        revision, known = (before.revision + 1, before.devices) if before is not None else (1, {})
        self._become(self.state.apply(judged({**known, **health}, NODE, revision)))

    def _become(self, state: NodeState) -> None:
        self.state = state
        self.version += 1
        self._more.set()
        self._more = anyio.Event()

    async def wait_past(self, version: int) -> None:
        while self.version <= version:
            await self._more.wait()

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        self._raise()
        if size < 1 or size > len(available) or not set(must_include) <= set(available) or len(must_include) > size:
            return ()
        rest = [device for device in sorted(available) if device not in must_include]
        return (*must_include, *rest[: size - len(must_include)])

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        self.started.set()
        if self.pause is not None:
            await self.pause.wait()
        self._raise()
        known = self.state.hardware.devices.get(resource, NO_DEVICES)
        state, granted = self.state, []
        for devices in containers:
            if not devices or len(set(devices)) != len(devices):
                raise InvalidField("devices_ids", "empty or repeated", "name each device once")
            if unknown := [device for device in devices if device not in known]:
                raise UnknownDevice(unknown)
            if busy := [device for device in devices if device in state.ownership.holders]:
                raise DeviceInUse(busy, state.ownership.holders[busy[0]])
            allocation = Allocation(
                id=AllocationID(f"a{len(state.allocations)}"), devices={resource: tuple(sorted(devices))}
            )
            state = state.holding(allocation)
            granted.append(allocation)
        self._become(state)
        return tuple(granted)

    def named(self, resource: ResourceName, allocation: Allocation) -> dict[ResourceName, tuple[DeviceID, ...]]:
        return {}

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        self.starting.append(tuple(devices))
        self._raise()

    def release_all(self) -> None:
        self._become(msgspec.structs.replace(self.state, allocations={}))

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault


class SilentPodResources:
    """A kubelet's record that cannot be read."""

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        raise KubeletAway("it does not answer")

    def written(self) -> tuple[int, ...]:
        return ()


def ledger_of(known: Topology | NodeState, clock: Clock | None = None, journal: MemoryJournal | None = None) -> Ledger:
    """A ledger with the hardware and health of this state, or of a machine whose devices are healthy."""
    state = known if isinstance(known, NodeState) else MemoryAllocator(known).state
    ledger = Ledger(state.node, journal or MemoryJournal(), clock or ManualClock())
    assert state.topology is not None and state.health is not None
    ledger.take_reading(state.topology)
    ledger.take_reading(state.health)
    return ledger


def recorded(known: Topology | NodeState, placement: str = "best-effort") -> tuple[DeviceAllocations, Ledger]:
    """The real allocator, its record in memory."""
    ledger = ledger_of(known)
    return start_allocations(ledger, SilentPodResources(), placement=placement), ledger


@contextmanager
def short_directory(fast: bool = False) -> Iterator[Path]:
    """
    A directory with a path that a socket's name fits behind: pytest's own are too long. `fast`: in memory where it can be,
    for files that are written some thousand times.
    """
    with tempfile.TemporaryDirectory(prefix="ta-", dir=MEMORY_DISK if fast and MEMORY_DISK.is_dir() else None) as name:
        yield Path(name)


@asynccontextmanager
async def served(plugin: DevicePlugin) -> AsyncIterator[v1beta1.DevicePluginStub]:
    """A client of this plugin, over a real socket."""
    with short_directory() as directory:
        server = GrpcServer(plugin, directory / "p.sock", "directory")
        await server.listen()
        channel = Channel(path=str(server.path))
        try:
            yield v1beta1.DevicePluginStub(channel)
        finally:
            channel.close()
            await server.stop(5)


@asynccontextmanager
async def serving(allocator: MemoryAllocator | None = None, load: Load | None = None) -> AsyncIterator[GrpcServer]:
    """A plugin of eight GPUs on its socket, which nobody has registered."""
    with short_directory() as directory:
        server = GrpcServer(
            DevicePlugin(GPU, allocator or MemoryAllocator(two_nodes())), directory / "p.sock", "directory", load
        )
        await server.listen()
        try:
            yield server
        finally:
            await server.stop(5)


def frame(kind: int, content: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


@dataclass
class Node:
    """A node with a kubelet and our front on it."""

    directory: Path
    allocator: MemoryAllocator
    kubelet: FakeKubelet
    front: KubeletFront
    clock: Clock
    tasks: TaskGroup
    channel: KeptChannel
    """To the kubelet's PodResources."""
    pod_resources: Path = field(init=False)

    def __post_init__(self) -> None:
        self.pod_resources = self.directory / "pod-resources" / "kubelet.sock"


def offers(machine: Topology) -> Callable[[FakeKubelet], bool]:
    """True of a kubelet in which every GPU and NIC of the machine is allocatable."""
    return lambda kubelet: all(kubelet.allocatable(name) == len(ids) for name, ids in machine.devices.items())


RESTRICTED = AdmissionRules(policy=Policy.RESTRICTED)


@asynccontextmanager
async def node(
    machine: Topology | None = None,
    *,
    allocator: MemoryAllocator | None = None,
    rules: AdmissionRules = RESTRICTED,
    clock: Clock | None = None,
    until: Callable[[FakeKubelet], bool] | None = None,
    chance: Random | None = None,
    changes: DirectoryChanges | None = None,
    containers: Containers | None = None,
) -> AsyncIterator[Node]:
    """
    Runs a fake kubelet and the front; yields when all resources are allocatable, or when `until` says. With `changes` the
    kernel tells of the plugin directory.
    """
    machine = machine or two_nodes()
    with short_directory() as directory:
        plugins, resources = directory / "device-plugins", directory / "pod-resources"
        plugins.mkdir()
        resources.mkdir()
        clock = clock or SystemClock()
        allocator = allocator or MemoryAllocator(machine)
        kubelet = FakeKubelet(plugins, resources, machine, rules, clock, chance)
        channel = KeptChannel(resources / "kubelet.sock", SystemClock())
        front = KubeletFront(
            allocator,
            plugins,
            clock,
            pod_resources=channel,
            drain_seconds=5.0,
            jitter=lambda: 1.0,
            changes=changes,
            containers=containers,
        )
        async with anyio.create_task_group() as tasks:
            if changes is not None:
                tasks.start_soon(changes.run)
            await tasks.start(kubelet.run)
            await tasks.start(front.run)
            await kubelet.until(until or offers(machine))
            while (
                until is None and front.reason() is not None
            ):  # the kubelet lists before we hear that we are registered
                await anyio.lowlevel.checkpoint()
            yield Node(directory, allocator, kubelet, front, clock, tasks, channel)
            tasks.cancel_scope.cancel()
        channel.close()


def pod(name: str, *, gpus: int = 0, nics: int = 0, cpus: int = 0) -> PodRequest:
    """A pod of one container; with `cpus` it is Guaranteed and has 1 GiB of memory."""
    return pod_of(container(gpus=gpus, nics=nics, cpus=cpus, gib=int(cpus > 0)), name=name)


async def learn_owners(kubelet: FakeKubelet) -> None:
    """Has the agent learn the owners of all that runs now: a call before a container starts waits for that."""
    for running in kubelet.running.values():
        for _, resource, devices in running.parts():
            request = v1beta1.PreStartContainerRequest(devices_ids=list(devices))
            await kubelet.plugins.endpoints[resource].client().pre_start_container(request)
