"""
Reads the kubelet's list of allocatable devices as far as it is needed.

A kubelet lists each device in a message of its own (v1.36.3): 17,500 shares are 1.3 MB, half a second for the generated code
and 17 MB of objects. So the answer stays encoded, and its messages are read one after the other.

Source: PodResources v1, AllocatableResourcesResponse and ContainerDevices.
"""

from collections.abc import Iterator
from typing import Any

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.codec import QuickCodec
from topoalign.kubelet.grpc.decoding import fields_of
from topoalign.kubelet.grpc.listed_pods import read_devices


class Encoded(QuickCodec):
    """Leaves an answer as it came."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The bytes of the answer."""
        return data


def allocatable_devices(answer: bytes) -> Iterator[tuple[ResourceName, list[DeviceID]]]:
    """
    The resource and devices of each message in an encoded AllocatableResourcesResponse, in its order. Raises GRPCError where
    it is none.
    """
    for part in fields_of(answer, 0, len(answer), v1.AllocatableResourcesResponse):
        if part.number != 1:
            continue
        yield read_devices(answer, part.content, part.end)
