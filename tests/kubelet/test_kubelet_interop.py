"""A client of another make, gRPC's own C core, speaks to the front."""

from typing import Any

import anyio
import grpc
import pytest
from device_allocations_support import MemoryAllocator
from kubelet_support import short_directory, two_nodes

from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.ids import GPU
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import LARGEST_REQUEST
from topoalign.kubelet.grpc.transport import GrpcServer

pytestmark = pytest.mark.anyio
SERVICE = "/v1beta1.DevicePlugin/"


async def test_all_five_methods_answer_a_client_of_another_make() -> None:
    with short_directory() as directory:
        server = GrpcServer(DevicePlugin(GPU, MemoryAllocator(two_nodes())), directory / "p.sock", "directory")
        await server.listen()
        async with grpc.aio.insecure_channel(f"unix://{server.path}") as channel:

            def unary(method: str, answer: type[Any]) -> Any:
                return channel.unary_unary(
                    SERVICE + method, request_serializer=bytes, response_deserializer=answer.FromString
                )

            watch = channel.unary_stream(
                SERVICE + "ListAndWatch",
                request_serializer=bytes,
                response_deserializer=v1beta1.ListAndWatchResponse.FromString,
            )(v1beta1.Empty())
            listed = await watch.read()
            options = await unary("GetDevicePluginOptions", v1beta1.DevicePluginOptions)(v1beta1.Empty())
            preferred = await unary("GetPreferredAllocation", v1beta1.PreferredAllocationResponse)(
                v1beta1.PreferredAllocationRequest(
                    container_requests=[
                        v1beta1.ContainerPreferredAllocationRequest(
                            available_deviceIDs=["GPU-0", "GPU-1"], allocation_size=1
                        )
                    ]
                )
            )
            allocate = unary("Allocate", v1beta1.AllocateResponse)
            allocated = await allocate(request("GPU-0", "GPU-1"))
            await unary("PreStartContainer", v1beta1.PreStartContainerResponse)(
                v1beta1.PreStartContainerRequest(devices_ids=["GPU-0"])
            )
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await allocate(request("GPU-99"))
            with pytest.raises(grpc.aio.AioRpcError) as large:
                await allocate(request("x" * (2 * LARGEST_REQUEST)))
            watch.cancel()
        with anyio.CancelScope(shield=True):
            await server.stop(1)

    assert 8 == len(listed.devices)
    assert options.get_preferred_allocation_available
    assert ["GPU-0"] == preferred.container_responses[0].device_i_ds
    assert {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"} == allocated.container_responses[0].envs
    assert grpc.StatusCode.INVALID_ARGUMENT is unknown.value.code()
    assert "UnknownDevice: not devices of this node: 'GPU-99'" in str(unknown.value.details())
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is large.value.code()


def request(*ids: str) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=list(ids))])
