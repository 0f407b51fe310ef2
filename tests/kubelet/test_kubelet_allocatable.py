"""The kubelet's list of allocatable devices is read as the generated code reads it, and no further than needed."""

from collections.abc import Iterator

import msgspec
import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from kubelet_support import node, two_nodes

from topoalign.allocator.device_plugin import front
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.pod_resources_codec import allocatable_devices
from topoalign.runtime.clock import SystemClock
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

TEXTS = st.text(max_size=8)
ANSWERS = st.builds(
    v1.AllocatableResourcesResponse,
    devices=st.lists(
        st.builds(
            v1.ContainerDevices,
            resource_name=TEXTS,
            device_ids=st.lists(TEXTS, max_size=3),
            topology=st.none() | st.just(v1.TopologyInfo(nodes=[v1.NumaNode(id=1)])),
        ),
        max_size=4,
    ),
    cpu_ids=st.lists(st.integers(0, 9), max_size=2),
    memory=st.lists(st.builds(v1.ContainerMemory, memory_type=TEXTS), max_size=1),
)


@given(ANSWERS)
def test_the_devices_are_those_that_the_generated_code_reads(answer: v1.AllocatableResourcesResponse) -> None:
    expected = [(part.resource_name, part.device_ids) for part in answer.devices]

    assert expected == list(allocatable_devices(bytes(answer)))


@pytest.mark.parametrize("broken", [b"\x0a\xff", b"\x0a\x03\x0a\x05a", b"\x0a\x03\x12\x01\xff"])
def test_what_is_no_answer_is_refused(broken: bytes) -> None:
    with pytest.raises(GRPCError):
        list(allocatable_devices(broken))


async def test_of_thousands_of_shares_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows that the kubelet has not lost the resource; where none is shown, all is read."""
    read: list[ResourceName] = []

    def counted(answer: bytes) -> Iterator[tuple[ResourceName, list[DeviceID]]]:
        for resource, devices in allocatable_devices(answer):
            read.append(resource)
            yield resource, devices

    monkeypatch.setattr(front, "allocatable_devices", counted)
    gpus = tuple(two_nodes().gpu_by_id)
    offer = Offer(resource=GPU, devices=gpus, replicas=100)
    async with node(msgspec.structs.replace(two_nodes(), offers=(offer,)), clock=ManualClock()) as it:
        watch = front.Guard(it.channel, SystemClock(), it.front.plugins.values)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 800)
        await watch.poll()

        assert [GPU] == read
        monkeypatch.setattr(it.front.plugins[GPU], "lists", lambda devices: False)
        await watch.poll()
        assert [GPU] * 801 == read
