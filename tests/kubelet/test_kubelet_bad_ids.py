"""Allocate with ids that cannot be meant, to the real allocator over a real socket: refused, quoted safely, no effect."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from device_allocations_support import MemoryAllocator, recorded
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import served, two_nodes

from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.events import AllocationGranted, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.kubelet.grpc.api import v1beta1

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def allocator() -> AsyncIterator[tuple[v1beta1.DevicePluginStub, Ledger]]:
    """The plugin of eight GPUs, of which GPU-6 is ill and GPU-7 cordoned."""
    allocator = MemoryAllocator(two_nodes())
    allocator.judge(
        {
            DeviceID("GPU-6"): DeviceHealth(state=HealthState.UNHEALTHY, reason="Xid 79"),
            DeviceID("GPU-7"): DeviceHealth(state=HealthState.HEALTHY, cordoned=True),
        }
    )
    device_allocations, ledger = recorded(allocator.state)
    async with served(DevicePlugin(GPU, device_allocations)) as client:
        yield client, ledger


def request(*containers: list[str]) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest(
        container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    )


MEGABYTE = "GPU-\x1b[2J" + "x" * 2**20
CASES: dict[str, tuple[list[str], str]] = {
    "unknown": (["GPU-99"], "'GPU-99'"),
    "repeated": (["GPU-0", "GPU-0"], "named more than once: 'GPU-0'"),
    "unhealthy": (["GPU-6"], "'GPU-6' is unhealthy: Xid 79"),
    "cordoned": (["GPU-7"], "'GPU-7' is cordoned"),
    "empty list": ([], "empty"),
    "empty id": ([""], "a device without a name"),
    "ten thousand": ([f"GPU-{i}" for i in range(8, 10_008)], "and 9992 more"),
    "one megabyte": ([MEGABYTE], "'GPU-?[2Jxxx"),
    "NUL": (["GPU-0\x00"], "'GPU-0?'"),
    "terminal": (["\x1b]0;owned\x07"], "'?]0;owned?'"),
}


@pytest.mark.parametrize("name", CASES)
async def test_bad_ids_beside_good_ones_are_refused_and_nothing_is_recorded(name: str) -> None:
    """Bad ids beside good ones are refused by name, and nothing is recorded."""
    ids, shown = CASES[name]
    async with allocator() as (plugin, ledger):
        before = len(ledger.pending)
        with pytest.raises(GRPCError) as caught:
            await plugin.allocate(request(["GPU-1"], ids))

        assert Status.INVALID_ARGUMENT is caught.value.status
        message = caught.value.message or ""
        assert shown in message
        assert message.isprintable()
        assert len(message) <= 1_000
        assert {} == ledger.state.allocations
        assert before == len(ledger.pending)


async def test_an_id_that_is_not_utf_8_is_refused_and_nothing_is_recorded() -> None:
    class Bytes(v1beta1.AllocateRequest):
        def __init__(self, encoded: bytes) -> None:
            self.__dict__["encoded"] = encoded

        def SerializeToString(self) -> bytes:
            encoded: bytes = self.__dict__["encoded"]
            return encoded

    bad = b"GPU-\xff\xfe"
    container = struct.pack("BB", 0x0A, len(bad)) + bad
    async with allocator() as (plugin, ledger):
        with pytest.raises(GRPCError) as caught:
            await plugin.allocate(Bytes(struct.pack("BB", 0x0A, len(container)) + container))

        assert Status.INVALID_ARGUMENT is caught.value.status
        assert (caught.value.message or "").isprintable()
        assert {} == ledger.state.allocations


async def test_good_ids_are_given_after_bad_ones() -> None:
    async with allocator() as (plugin, ledger):
        for ids, _ in CASES.values():
            with pytest.raises(GRPCError):
                await plugin.allocate(request(["GPU-1"], ids))
        await plugin.allocate(request(["GPU-1"]))

        assert [AllocationGranted] == [type(event) for event, _ in ledger.pending][1:]
