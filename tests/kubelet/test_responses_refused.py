"""Devices that a container could not use if it were told of them: nothing is allocated, and it is said why."""

from pathlib import Path

import msgspec
import pytest
from containers_support import MIG, Host, machine, request, told
from device_allocations_support import MemoryAllocator
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import served

from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Configuration

pytestmark = pytest.mark.anyio

GPU_KIND = "k8s.device-plugin.nvidia.com/gpu"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def refusal(host: Host, configuration: Configuration, *ids: str, on: Topology, resource: ResourceName) -> str:
    """What the kubelet is told where nothing was allocated."""
    allocator = MemoryAllocator(on)
    async with served(DevicePlugin(resource, allocator, host.containers(configuration))) as client:
        with pytest.raises(GRPCError) as refused:
            await client.allocate(request(*ids))
    assert {} == allocator.state.allocations, "what cannot be told is not recorded either"
    assert Status.UNAVAILABLE == refused.value.status
    return str(refused.value.message)


async def test_a_missing_required_imex_channel_refuses_gpus_and_not_nics(host: Host) -> None:
    """A required IMEX channel that does not exist refuses GPUs and leaves NICs alone."""
    configuration = host.configuration("envvar", imex={"channelIDs": [1], "required": True})
    message = await refusal(host, configuration, "GPU-a", on=machine(), resource=GPU)

    assert "IMEX channel 1 is required, and /dev/nvidia-caps-imex-channels/channel1 is not there" in message
    assert "imex.required" in message
    assert "mlx5_0" == (await told(host, configuration, "mlx5_0", resource=NIC)).envs["TOPOALIGN_NICS"]


async def test_a_gpu_without_a_device_node_is_refused_and_the_others_are_not(host: Host) -> None:
    blind = machine()
    gpus = (*blind.gpus[1:], Gpu(id=DeviceID("GPU-a"), index=9))
    blind = msgspec.structs.replace(blind, gpus=gpus)
    configuration = host.configuration("cdi-cri", plugin={"passDeviceSpecs": True})

    assert "device node of GPU-a" in await refusal(host, configuration, "GPU-a", on=blind, resource=GPU)
    assert [f"{GPU_KIND}=GPU-b"] == [d.name for d in (await told(host, configuration, "GPU-b", on=blind)).cdi_devices]
    assert "GPU-a" == (await told(host, host.configuration(), "GPU-a", on=blind)).envs["NVIDIA_VISIBLE_DEVICES"]


async def test_a_mig_instance_whose_capabilities_are_not_numbered_is_refused(host: Host) -> None:
    (host.proc / "driver/nvidia-caps/mig-minors").write_text("gpu4/gi7/access 21\ngpu4/gi7/ci0/access x\n\n/\n")
    configuration = host.configuration("envvar", plugin={"passDeviceSpecs": True})

    assert "MIG-x" in await refusal(host, configuration, "MIG-x", on=machine(), resource=MIG)


async def test_a_mig_instance_without_a_known_index_is_not_told_by_a_guess(host: Host) -> None:
    gpus = tuple(
        msgspec.structs.replace(gpu, mig=tuple(msgspec.structs.replace(each, index=None) for each in gpu.mig or ()))
        for gpu in machine().gpus
    )
    unnumbered = msgspec.structs.replace(machine(), gpus=gpus)
    configuration = host.configuration("envvar", plugin={"deviceIDStrategy": "index"})

    assert "use deviceIDStrategy uuid" in await refusal(host, configuration, "MIG-x", on=unnumbered, resource=MIG)


@pytest.mark.parametrize(
    "id", ["GPU-a,GPU-b", "GPU-a\nLD_PRELOAD=/x", "GPU-a\0", "../../etc", "GPU a", "all\u202e", "-"]
)
async def test_an_id_that_could_be_read_as_something_else_is_told_to_nobody(host: Host, id: str) -> None:
    hostile = Topology(nodes=machine().nodes, gpus=(Gpu(id=DeviceID(id), index=0, minor=0),))
    message = await refusal(host, host.configuration(), id, on=hostile, resource=GPU)

    assert "cannot be passed to a container" in message
    assert message.isprintable()
