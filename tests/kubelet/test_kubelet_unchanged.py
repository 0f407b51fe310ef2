"""An answer that is polled is decoded where it differs from the one before, and only there."""

from random import Random

import pytest
from grpclib.exceptions import GRPCError

from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.unchanged import UNCHANGED, ComparingCodec

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
    first = ComparingCodec(None)
    first.decode(answer("a", "b", "c"), KIND)

    assert UNCHANGED is ComparingCodec(first.fields).decode(answer("c", "b", "a"), KIND)


@pytest.mark.parametrize("other", [answer("a"), answer("a", "b", "c"), answer("a", "b", node=1), answer()])
def test_other_devices_are_decoded(other: bytes) -> None:
    first = ComparingCodec(None)
    first.decode(answer("a", "b"), KIND)
    second = ComparingCodec(first.fields)

    assert KIND.FromString(other) == second.decode(other, KIND)
    assert first.fields != second.fields


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(GRPCError):
        ComparingCodec(None).decode(b"\x0a\xff", KIND)
