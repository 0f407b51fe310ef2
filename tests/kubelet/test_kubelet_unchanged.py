"""An answer that is polled is decoded where it differs from the one before, and only there."""

from random import Random

import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.decoding import field
from topoalign.kubelet.grpc.pod_resources_codec import read_changed_devices

KIND = v1.AllocatableResourcesResponse


def answer(*devices: str, node: int = 0) -> bytes:
    """In the order of a kubelet's map."""
    parts = [
        v1.ContainerDevices(
            resource_name="example.com/fpga",
            device_ids=[device],
            topology=v1.TopologyInfo(nodes=[v1.NumaNode(id=node)]),
        )
        for device in devices
    ]
    Random(len(devices)).shuffle(parts)
    return bytes(KIND(devices=parts, cpu_ids=[0, 1]))


def test_the_same_devices_in_another_order_are_not_decoded() -> None:
    known, _ = read_changed_devices(answer("a", "b", "c"), None)

    assert (known, None) == read_changed_devices(answer("c", "b", "a"), known)


@pytest.mark.parametrize("other", [answer("a"), answer("a", "b", "c"), answer("a", "b", node=1), answer()])
def test_other_devices_are_decoded(other: bytes) -> None:
    known, _ = read_changed_devices(answer("a", "b"), None)
    fields, decoded = read_changed_devices(other, known)

    assert KIND.FromString(other) == decoded
    assert known != fields


@pytest.mark.parametrize("broken", [b"\x0a\xff", b"\x0a\x05a", b"\x0a", b"\x0b\x01a"])
def test_what_is_no_message_is_refused(broken: bytes) -> None:
    with pytest.raises(GRPCError):
        read_changed_devices(broken, None)


PARTS = st.builds(
    v1.ContainerDevices,
    resource_name=st.sampled_from(["nvidia.com/gpu", "nvidia.com/gpu.shared", "example.com/fpga", ""]),
    device_ids=st.lists(st.sampled_from(["a", "b" * 200]), max_size=2),
)


@given(st.lists(PARTS, max_size=6), st.lists(st.integers(0, 300), max_size=3), st.booleans())
def test_what_is_left_out_is_neither_compared_nor_decoded(
    parts: list[v1.ContainerDevices], cpus: list[int], left_out: bool
) -> None:
    """Without anything left out it is the whole answer."""
    ours = ("nvidia.com/gpu", "nvidia.com/fpga") if left_out else ()
    wanted = [part for part in parts if part.resource_name not in ours]
    memory = [v1.ContainerMemory(memory_type="nvidia.com/gpu")]
    answer = bytes(KIND(devices=parts, cpu_ids=cpus, memory=memory))
    fields, decoded = read_changed_devices(answer, None, tuple(field(1, name.encode()) for name in ours))

    assert KIND(devices=wanted, cpu_ids=cpus, memory=memory) == decoded
    assert all(b"\x0envidia.com/gpu" not in each for each in fields if left_out and each[0] == 0x0A)
