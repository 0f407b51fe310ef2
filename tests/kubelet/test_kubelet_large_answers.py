"""A kubelet with thousands of devices answers at length, and nothing else here waits for that to be read."""

from threading import get_ident
from typing import Any

import anyio
import pytest
from kubelet_support import short_directory

from topoalign.kubelet.grpc import codec
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.kubelet_client import KubeletAway, call_once
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.runtime.clock import SystemClock

pytestmark = pytest.mark.anyio


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


async def asked(kubelet: Kubelet) -> v1.AllocatableResourcesResponse:
    with short_directory() as directory:
        server = GrpcServer(kubelet, directory / "kubelet.sock", "directory")
        await server.listen()
        try:
            return await call_once(
                server.path,
                lambda channel: v1.PodResourcesListerStub(channel).get_allocatable_resources(
                    v1.AllocatableResourcesRequest()
                ),
                SystemClock(),
                10,
            )
        finally:
            with anyio.CancelScope(shield=True):
                await server.stop(1)


@pytest.mark.parametrize("devices", [8, 1000])
async def test_a_long_answer_is_read_whole_and_outside_the_event_loop(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is read whole, and a long one in a thread beside the event loop."""
    threads: list[tuple[type[Any], int]] = []

    class Recording(codec.Codec):
        def decode(self, data: bytes, message_type: Any) -> Any:
            threads.append((message_type, get_ident()))
            return super().decode(data, message_type)

    monkeypatch.setattr(codec, "CODEC", Recording())
    answer = await asked(Kubelet(devices))

    beside = [thread != get_ident() for kind, thread in threads if kind is v1.AllocatableResourcesResponse]
    assert devices == len(answer.devices)
    assert [devices == 1000] == beside


async def test_a_long_answer_that_is_none_is_the_kubelets_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nonsense(v1.AllocatableResourcesResponse):
        """Says nothing but noise."""

        def __init__(self) -> None:
            pass

        def SerializeToString(self) -> bytes:
            return b"\xff" * 2 * codec.DECODED_AT_ONCE

    async def noise(self: Kubelet, message: v1.AllocatableResourcesRequest) -> v1.AllocatableResourcesResponse:
        return Nonsense()

    monkeypatch.setattr(Kubelet, "get_allocatable_resources", noise)
    with pytest.raises(KubeletAway, match="not a AllocatableResourcesResponse"):
        await asked(Kubelet(1))
