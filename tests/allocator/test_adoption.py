"""A node that ran another plugin is taken over with its containers, and given back with them: docs/migration.md."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from device_allocations_support import Node as Allocator
from device_allocations_support import start_allocations
from kubelet_support import NODE, RESTRICTED, pod, short_directory, two_nodes

from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.ids import GPU, DeviceID, Namespace, PodName
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import call_once
from topoalign.kubelet.grpc.plugin_api import API_VERSION, KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = pytest.mark.anyio

GPUS = 8
MACHINE = two_nodes(gpus=GPUS, nics=0)
DEFAULT = Namespace("default")


class NvidiaPlugin(Servicer, v1beta1.DevicePluginBase):
    """What NVIDIA's plugin (v0.20.0) does for whole GPUs: lists them by uuid, names them to the container, keeps nothing."""

    def __init__(self) -> None:
        self.asked: list[frozenset[str]] = []
        self._ending = anyio.Event()

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        return v1beta1.DevicePluginOptions(get_preferred_allocation_available=False)

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        yield v1beta1.ListAndWatchResponse(
            devices=[
                v1beta1.Device(
                    id=gpu.id,
                    health="Healthy",
                    topology=v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=gpu.numa_affinity[0])]),
                )
                for gpu in MACHINE.gpus
            ]
        )
        await self._ending.wait()

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        answers = []
        for request in message.container_requests:
            self.asked.append(frozenset(request.devices_ids))
            devices = ",".join(request.devices_ids)
            answers.append(v1beta1.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": devices}))
        return v1beta1.AllocateResponse(container_responses=answers)

    @asynccontextmanager
    async def running(self, directory: Path) -> AsyncIterator[None]:
        server = GrpcServer(self, directory / "nvidia-gpu.sock", "directory")
        await server.listen()
        request = v1beta1.RegisterRequest(version=API_VERSION, endpoint="nvidia-gpu.sock", resource_name=GPU)
        await call_once(
            directory / KUBELET_SOCKET,
            lambda channel: v1beta1.RegistrationStub(channel).register(request),
            SystemClock(),
            10,
        )
        yield
        self._ending.set()
        await server.stop(1.0)


class Node:
    """A node whose kubelet goes on while its plugins come and go."""

    def __init__(self, directory: Path) -> None:
        self.plugins, self.resources = directory / "device-plugins", directory / "pod-resources"
        self.kubelet = FakeKubelet(self.plugins, self.resources, MACHINE, RESTRICTED)

    @asynccontextmanager
    async def nvidia(self) -> AsyncIterator[NvidiaPlugin]:
        plugin = NvidiaPlugin()
        async with plugin.running(self.plugins):
            await self.listed()
            yield plugin

    @asynccontextmanager
    async def ours(self) -> AsyncIterator[Allocator]:
        """An allocator with an empty state directory; it has polled the kubelet once."""
        it = Allocator()
        it.topology = MACHINE
        it.hear_topology(it.ledger, 2)
        client = PodResourcesClient(self.resources / "kubelet.sock", self.plugins, it.clock)
        it.device_allocations = start_allocations(it.ledger, client, settle_seconds=0)
        async with client, background() as tasks:
            await tasks.start(KubeletFront(it.device_allocations, self.plugins, it.clock).run)
            await self.listed()
            await it.device_allocations.reconcile()
            yield it

    async def listed(self) -> None:
        with anyio.fail_after(20):
            await self.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == GPUS)

    async def unlisted(self) -> None:
        with anyio.fail_after(20):
            await self.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 0)

    def held(self) -> dict[str, frozenset[DeviceID]]:
        """Pod -> its GPUs, as the kubelet has it."""
        return {
            running.pod.name: frozenset(device for _, _, devices in running.parts() for device in devices)
            for running in self.kubelet.running.values()
        }


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    with short_directory() as directory:
        it = Node(directory)
        async with background() as tasks:
            await tasks.start(it.kubelet.run)
            yield it


def fits(decision: Decision) -> None:
    assert isinstance(decision, Admission), decision


def recorded(it: Allocator) -> dict[str, frozenset[DeviceID]]:
    """The same as our record has it."""
    return {a.owner.pod: a.device_ids for a in it.ledger.state.allocations.values() if a.owner is not None}


async def test_a_node_of_nvidias_plugin_is_adopted_with_its_running_containers() -> None:
    async with node() as it:
        async with it.nvidia():
            fits(await it.kubelet.admit(pod("train", gpus=2)))
            fits(await it.kubelet.admit(pod("eval", gpus=1)))
        await it.unlisted()
        running = it.held()
        async with it.ours() as allocator:
            assert running == recorded(allocator) == it.held(), "with their owners, at the first poll"
            fits(await it.kubelet.admit(pod("new", gpus=4)))
            refused = await it.kubelet.admit(pod("too-many", gpus=2))
            await allocator.device_allocations.reconcile()

            assert isinstance(refused, Refusal)
            assert {*running, "new"} == it.held().keys()
            assert it.held() == recorded(allocator)
            assert 7 == len(frozenset().union(*it.held().values())), "no device twice"
            assert 3 == len(allocator.said(AllocationGranted)), "what was adopted is announced like any grant"


async def test_what_was_adopted_is_released_when_its_pod_ends() -> None:
    """What was adopted is released when its pod ends, and given out again."""
    async with node() as it:
        async with it.nvidia():
            fits(await it.kubelet.admit(pod("train", gpus=8)))
        await it.unlisted()
        async with it.ours() as allocator:
            await it.kubelet.remove(DEFAULT, PodName("train"))
            fits(await it.kubelet.admit(pod("next", gpus=8)))
            await allocator.device_allocations.reconcile()

            assert it.held() == recorded(allocator)
            assert ["next"] == list(it.held())


async def test_a_node_given_back_to_nvidias_plugin_keeps_its_allocations() -> None:
    """A node is given back to NVIDIA's plugin, and the kubelet remembers who holds what."""
    async with node() as it:
        async with it.ours() as allocator:
            fits(await it.kubelet.admit(pod("train", gpus=2)))
            await allocator.device_allocations.reconcile()
            running = recorded(allocator)
        await it.unlisted()
        async with it.nvidia() as plugin:
            assert running == it.held(), "containers go on"
            fits(await it.kubelet.admit(pod("new", gpus=4)))
            refused = await it.kubelet.admit(pod("too-many", gpus=4))

            assert isinstance(refused, Refusal)
            assert [it.held()["new"]] == plugin.asked
            assert running["train"].isdisjoint(it.held()["new"])
            await it.kubelet.restart()
            assert {"train", "new"} == it.held().keys(), "its checkpoint is the truth"


async def test_back_and_forth_leaves_every_container_with_its_devices() -> None:
    async with node() as it:
        for turn in range(2):
            async with it.nvidia():
                fits(await it.kubelet.admit(pod(f"theirs-{turn}", gpus=1)))
            await it.unlisted()
            before = it.held()
            async with it.ours() as allocator:
                assert before == recorded(allocator)
                fits(await it.kubelet.admit(pod(f"ours-{turn}", gpus=1)))
            await it.unlisted()

        assert 4 == len(it.held()) == len(frozenset().union(*it.held().values()))
        assert NODE == allocator.ledger.node
