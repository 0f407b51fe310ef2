"""What the tests of the kubelet front share: a small node, an allocator in memory, and directories that sockets fit into."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import anyio
from anyio.abc import TaskGroup
from decision_support import container
from decision_support import pod as pod_of
from device_allocations_support import MemoryAllocator
from grpclib.client import Channel

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.requests import AdmissionRules, PodRequest, Policy
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import KeptChannel
from topoalign.kubelet.grpc.transport import GrpcServer, Load, Servicer
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

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


@contextmanager
def short_directory(fast: bool = False) -> Iterator[Path]:
    """
    A directory with a path that a socket's name fits behind: pytest's own are too long. `fast`: in memory where it can be,
    for files that are written some thousand times.
    """
    with tempfile.TemporaryDirectory(prefix="ta-", dir=MEMORY_DISK if fast and MEMORY_DISK.is_dir() else None) as name:
        yield Path(name)


@asynccontextmanager
async def serving(
    plugin: Servicer | None = None, load: Load | None = None, directory: Path | None = None
) -> AsyncIterator[GrpcServer]:
    """This plugin, or one of eight GPUs, on a socket in this directory or one of its own; nobody has registered it."""
    with short_directory() as own:
        plugin = plugin or DevicePlugin(GPU, MemoryAllocator(two_nodes()))
        server = GrpcServer(plugin, (directory or own) / "p.sock", "directory", load)
        await server.listen()
        try:
            yield server
        finally:
            await server.stop(5)


@asynccontextmanager
async def served(plugin: DevicePlugin) -> AsyncIterator[v1beta1.DevicePluginStub]:
    """A client of this plugin, over a real socket."""
    async with serving(plugin) as server:
        channel = Channel(path=str(server.path))
        try:
            yield v1beta1.DevicePluginStub(channel)
        finally:
            channel.close()


def frame(kind: int, content: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


@dataclass
class Node:
    directory: Path
    allocator: MemoryAllocator
    kubelet: FakeKubelet
    front: KubeletFront
    clock: Clock
    tasks: TaskGroup
    channel: KeptChannel
    """To the kubelet's PodResources."""


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
        clock = clock or SystemClock()
        allocator = allocator or MemoryAllocator(machine)
        kubelet = FakeKubelet(directory / "device-plugins", directory / "pod-resources", machine, rules, clock, chance)
        channel = KeptChannel(directory / "pod-resources" / "kubelet.sock", SystemClock())
        front = KubeletFront(
            allocator,
            kubelet.plugins_dir,
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
