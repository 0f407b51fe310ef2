"""Allocate of shares by MPS: real sockets, a kubelet, and daemons as real processes that die and come back."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from containers_support import request
from decision_support import admitted, refused
from device_allocations_support import MemoryAllocator
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import Node, pod, two_nodes
from kubelet_support import node as kubelet_node
from mps_support import MpsNode
from serving_support import configured

from topoalign.allocator.containers.containers import Containers
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.mps_files import Announcement, Serves
from topoalign.plugin_config.resource_offers import offer_resources

pytestmark = pytest.mark.anyio

QUARTER = "name: gpu, replicas: 4"
MACHINE = two_nodes(gpus=2, nics=1)
FIRST, SECOND = MACHINE.gpu_by_id
SERVES = Serves(devices=frozenset({FIRST, SECOND}), replicas=4)


def offering(node: MpsNode) -> Topology:
    return msgspec.structs.replace(MACHINE, offers=offer_resources(MACHINE, configured(node.config.read_text())).offers)


@asynccontextmanager
async def kubelet(node: MpsNode) -> AsyncIterator[tuple[Node, Containers]]:
    """A kubelet to which this node's configuration is offered."""
    configuration = configured(node.config.read_text())
    containers = Containers(lambda: configuration)
    machine = offering(node)
    async with kubelet_node(machine, allocator=MemoryAllocator(machine), containers=containers) as it:
        yield it, containers


async def told(it: Node, *ids: str) -> v1beta1.ContainerAllocateResponse:
    response = await it.kubelet.plugins.endpoints[GPU].client().allocate(request(*ids))
    return response.container_responses[0]


async def test_shares_are_given_out_while_their_daemon_serves(node: MpsNode) -> None:
    """
    Before it is ready, and from the moment it dies until its successor has its limits, a pod is refused with the reason; the
    devices stay listed as healthy throughout, as with NVIDIA's plugin.
    """
    node.share(QUARTER)
    async with kubelet(node) as (it, containers):
        machine = it.allocator.state.hardware
        assert [8, 8] == [it.kubelet.capacity(GPU), it.kubelet.allocatable(GPU)]
        refusal = refused(await it.kubelet.admit(pod("early", gpus=1)))
        assert "the MPS daemon of nvidia.com/gpu is not ready" in str(refusal)
        assert {} == it.allocator.state.allocations, "nothing is recorded"
        assert "topoalign mps" in (containers.poll(machine) or "")

        async with node.up():
            await node.until(node.serving)
            admitted(await it.kubelet.admit(pod("one", gpus=1)))
            assert containers.poll(machine) is None

            os.kill(node.pid(), signal.SIGKILL)
            await node.until(lambda: node.serving() is None)
            assert "is not ready" in str(refused(await it.kubelet.admit(pod("two", gpus=1))))
            assert 8 == it.kubelet.allocatable(GPU)

            await node.clock.advance(1)
            await node.until(node.serving)
            admitted(await it.kubelet.admit(pod("two", gpus=1)))
        refused(await it.kubelet.admit(pod("late", gpus=1)))


async def test_a_container_gets_pipes_and_shared_memory_and_no_limits(node: MpsNode) -> None:
    """The limits are the daemon's, where a pod cannot change them."""
    node.share(QUARTER)
    async with node.up(), kubelet(node) as (it, _):
        await node.until(node.serving)
        response = await told(it, f"{SECOND}::2")

    pipe = "/mps/nvidia.com/gpu/pipe"
    assert {"CUDA_MPS_PIPE_DIRECTORY": pipe, "NVIDIA_VISIBLE_DEVICES": SECOND} == response.envs
    assert [(pipe, f"{node.root}/nvidia.com/gpu/pipe", False), ("/dev/shm", f"{node.root}/shm", False)] == [
        (mount.container_path, mount.host_path, mount.read_only) for mount in response.mounts
    ]


@pytest.mark.parametrize(
    "serves",
    [
        Serves(devices=frozenset({FIRST}), replicas=4),
        Serves(devices=frozenset({FIRST, SECOND}), replicas=8),
        Serves(devices=frozenset({DeviceID("GPU-other")}), replicas=4),
    ],
)
async def test_a_daemon_for_other_devices_or_shares_is_not_taken(node: MpsNode, serves: Serves) -> None:
    """After a change of the configuration agent and daemon do not follow at the same moment."""
    node.share(QUARTER)
    (node.root / GPU).mkdir(parents=True)
    Announcement(node.root, GPU).publish(serves)
    async with kubelet(node) as (it, _):
        with pytest.raises(GRPCError) as caught:
            await told(it, f"{SECOND}::2")

    assert Status.UNAVAILABLE == caught.value.status
    assert "other devices or shares" in str(caught.value.message)


async def test_whole_gpus_beside_shares_need_no_daemon(node: MpsNode) -> None:
    node.share(f"name: gpu, replicas: 4, devices: [{FIRST}]")
    async with kubelet(node) as (it, _):
        assert {"NVIDIA_VISIBLE_DEVICES": SECOND} == (await told(it, SECOND)).envs
        with pytest.raises(GRPCError):
            await told(it, f"{FIRST}::0")


async def test_mounts_are_added_to_those_of_the_device_list(node: MpsNode) -> None:
    node.share(QUARTER)
    text = node.config.read_text().replace("flags: {", "flags: {plugin: {deviceListStrategy: volume-mounts}, ")
    node.config.write_text(text)
    (node.root / GPU).mkdir(parents=True)
    Announcement(node.root, GPU).publish(SERVES)
    async with kubelet(node) as (it, _):
        mounts = [mount.container_path for mount in (await told(it, f"{FIRST}::0")).mounts]

    assert [f"/var/run/nvidia-container-devices/{FIRST}", "/mps/nvidia.com/gpu/pipe", "/dev/shm"] == mounts
