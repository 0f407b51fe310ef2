"""A kubelet with thousands of devices answers at length, and nothing else here waits for that to be read."""

from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

import anyio
import pytest
from kubelet_support import short_directory

from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.decoding import CODEC
from topoalign.kubelet.grpc.kubelet_client import DECODED_AT_ONCE, KeptChannel, KubeletAway
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.runtime.clock import SystemClock

pytestmark = pytest.mark.anyio

T = TypeVar("T")


class Kubelet(Servicer, v1.PodResourcesListerBase):
    """Knows so many devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    async def get_allocatable_resources(
        self, message: v1.AllocatableResourcesRequest
    ) -> v1.AllocatableResourcesResponse:
        devices = [
            v1.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=[f"GPU-0::{n}"]) for n in range(self.devices)
        ]
        return v1.AllocatableResourcesResponse(devices=devices)


KIND = v1.AllocatableResourcesResponse


async def asked(kubelet: Kubelet, read: Callable[[bytes], T]) -> T:
    with short_directory() as directory:
        server = GrpcServer(kubelet, directory / "kubelet.sock", "directory")
        channel = KeptChannel(server.path, SystemClock())
        await server.listen()
        try:
            return await channel.ask(
                lambda channel: v1.PodResourcesListerStub(channel).get_allocatable_resources(
                    v1.AllocatableResourcesRequest()
                ),
                10,
                read,
            )
        finally:
            channel.close()
            with anyio.CancelScope(shield=True):
                await server.stop(1)


@pytest.mark.parametrize("devices", [8, 1000])
async def test_a_long_answer_is_read_whole_and_outside_the_event_loop(devices: int) -> None:
    """An answer is read whole, and a long one in a thread beside the event loop."""

    def read(data: bytes) -> tuple[v1.AllocatableResourcesResponse, int]:
        return CODEC.decode(data, KIND), get_ident()

    answer, thread = await asked(Kubelet(devices), read)

    assert devices == len(answer.devices)
    assert (devices == 1000) == (thread != get_ident())


@pytest.mark.parametrize("size", [40, 2 * DECODED_AT_ONCE])
async def test_an_answer_that_is_none_is_the_kubelets_fault(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nonsense(v1.AllocatableResourcesResponse):
        """Says nothing but noise."""

        def __init__(self) -> None:
            pass

        def SerializeToString(self) -> bytes:
            return b"\xff" * size

    async def noise(self: Kubelet, message: v1.AllocatableResourcesRequest) -> v1.AllocatableResourcesResponse:
        return Nonsense()

    monkeypatch.setattr(Kubelet, "get_allocatable_resources", noise)
    with pytest.raises(KubeletAway, match="not a AllocatableResourcesResponse"):
        await asked(Kubelet(1), lambda data: CODEC.decode(data, KIND))
