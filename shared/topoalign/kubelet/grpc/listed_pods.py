"""
Decodes the kubelet's list of pods, most of which are devices.

A kubelet lists each device of a container in a message of its own, with its resource and its NUMA nodes (v1.36.3): 16
containers with 20 and 60 units of GPUs have 1,280, on which the generated code spends most of the time of a question. So
resources and ids are read here, NUMA nodes are passed over, and the generated code decodes the rest.

Source: PodResources v1, ListPodResourcesResponse, PodResources, ContainerResources and ContainerDevices.
"""

from typing import Any

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.codec import CODEC, DECODED_AT_ONCE, QuickCodec, Undecoded
from topoalign.kubelet.grpc.decoding import broken, field_at, fields_of, text
from topoalign.kubelet.grpc.protobuf import field

Devices = dict[ResourceName, set[DeviceID]]
"""Resource -> the devices of a container."""

PODS = 1
CONTAINERS = 3
DEVICES = 2
"""Fields of the answer, of a pod and of a container."""
RESOURCE = 1
DEVICE = 2
TOPOLOGY = 3
"""Fields of ContainerDevices."""
MESSAGE = 2
"""The wire type of messages and texts."""
DEVICES_KEY, DEVICE_KEY, TOPOLOGY_KEY = (number << 3 | MESSAGE for number in (DEVICES, DEVICE, TOPOLOGY))


class ListedPodsCodec(QuickCodec):
    """Of one answer. It decodes to an answer without devices, which are in `devices`."""

    def __init__(self) -> None:
        self.devices: list[Devices] = []
        """Of each container, in the order in which pods and their containers are listed."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The answer, or an Undecoded one, as `QuickCodec.decode`. Raises GRPCError where it is none."""
        if len(data) > DECODED_AT_ONCE:
            return Undecoded(data, message_type, self._decode)
        return self._decode(data, message_type)

    def _decode(self, data: bytes, message_type: Any) -> Any:
        self.devices = []
        rest = b"".join(
            field(PODS, self._pod(data, each.content, each.end))
            if (each.number, each.wire) == (PODS, MESSAGE)
            else data[each.start : each.end]
            for each in fields_of(data, 0, len(data), v1.ListPodResourcesResponse)
        )
        return CODEC.decode(rest, message_type)

    def _pod(self, data: bytes, at: int, end: int) -> bytes:
        """The pod that stands there, without devices."""
        return b"".join(
            field(CONTAINERS, self._container(data, each.content, each.end))
            if (each.number, each.wire) == (CONTAINERS, MESSAGE)
            else data[each.start : each.end]
            for each in fields_of(data, at, end, v1.PodResources)
        )

    def _container(self, data: bytes, at: int, end: int) -> bytes:
        """The container that stands there, without its devices."""
        found = Devices()
        rest = list[bytes]()
        begins = b""
        ids = set[DeviceID]()
        while (at := add_alike(data, at, end, begins, ids)) < end:
            each = field_at(data, at, end, v1.ContainerResources)
            at = each.end
            if (each.number, each.wire) != (DEVICES, MESSAGE):
                rest.append(data[each.start : at])
                continue
            resource, some = read_devices(data, each.content, at)
            ids = found.setdefault(resource, set())
            ids.update(some)
            begins = field(RESOURCE, resource.encode()) + bytes((DEVICE_KEY,))
        self.devices.append(found)
        return b"".join(rest)


def add_alike(data: bytes, at: int, end: int, begins: bytes, ids: set[DeviceID]) -> int:
    """
    Adds the ids of the devices that stand there, as a kubelet lists them: in messages of one resource, each with a short id
    and NUMA nodes. `begins`: how their content begins, with the key of the id; empty: not known. Returns where the next
    field of another kind is. Raises GRPCError for an id that is not UTF-8.
    """
    size = 3 + len(begins)
    try:
        while begins and at < end and data[at] == DEVICES_KEY and data.startswith(begins, at + 2):
            start = at + size
            after = at + 2 + data[at + 1]
            if data[at + 1] >= 0x80 or not start <= after <= end:
                break
            stop = start + data[start - 1]
            if stop != after and not (
                stop + 1 < after and data[stop] == TOPOLOGY_KEY and stop + 2 + data[stop + 1] == after
            ):
                break
            ids.add(DeviceID(data[start:stop].decode()))
            at = after
    except UnicodeDecodeError as error:
        raise broken(v1.ContainerDevices, "a text that is not UTF-8") from error
    return at


def read_devices(data: bytes, at: int, end: int) -> tuple[ResourceName, list[DeviceID]]:
    """Resource and devices of the message that stands there. Raises GRPCError where it is none."""
    found: dict[int, list[str]] = {RESOURCE: [""], DEVICE: []}
    for each in fields_of(data, at, end, v1.ContainerDevices):
        if each.number in found:
            if each.wire != MESSAGE:
                raise broken(v1.ContainerDevices, "a field has another type")
            found[each.number].append(text(v1.ContainerDevices, data[each.content : each.end]))
    return ResourceName(found[RESOURCE][-1]), [DeviceID(device) for device in found[DEVICE]]
