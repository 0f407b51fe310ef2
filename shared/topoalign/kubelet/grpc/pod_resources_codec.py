"""
Decodes the answers of the kubelet's PodResources, most of which are devices.

A kubelet lists each device in a message of its own, with its resource and its NUMA nodes (v1.36.3): 16 containers with 20
and 60 units of GPUs have 1,280, which take the generated code 40 ms. So resources and ids are read here, in a seventh of
that time, NUMA nodes are skipped, and the generated code decodes the rest.

Source: PodResources v1.
"""

from collections.abc import Iterator

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.decoding import CODEC, decode_text, field, iterate_fields, malformed_message

Devices = dict[ResourceName, set[DeviceID]]
"""Resource -> the devices of a container."""

PODS = 1
CONTAINERS = 3
DEVICES = 2
"""Fields of the answer, of a pod and of a container."""
RESOURCE = 1
DEVICE = 2
"""Fields of ContainerDevices."""
MESSAGE = 2
"""The wire type of messages and texts."""


def read_listed_pods(data: bytes) -> tuple[v1.ListPodResourcesResponse, list[Devices]]:
    """Decodes an answer to List: without devices, and the devices of each container in its order. Raises GRPCError."""
    devices: list[Devices] = []
    rest = b"".join(
        field(PODS, read_pod(data, each.content, each.end, devices))
        if (each.number, each.wire) == (PODS, MESSAGE)
        else data[each.start : each.end]
        for each in iterate_fields(data, 0, len(data), v1.ListPodResourcesResponse)
    )
    return CODEC.decode(rest, v1.ListPodResourcesResponse), devices


def read_pod(data: bytes, at: int, end: int, devices: list[Devices]) -> bytes:
    """The pod that stands there, without devices, which are added to `devices`."""
    parts = []
    for each in iterate_fields(data, at, end, v1.PodResources):
        if (each.number, each.wire) == (CONTAINERS, MESSAGE):
            rest, held = read_container(data, each.content, each.end)
            parts.append(field(CONTAINERS, rest))
            devices.append(held)
        else:
            parts.append(data[each.start : each.end])
    return b"".join(parts)


def read_container(data: bytes, at: int, end: int) -> tuple[bytes, Devices]:
    """The container that stands there, without its devices, and these."""
    found = Devices()
    rest = []
    for each in iterate_fields(data, at, end, v1.ContainerResources):
        if (each.number, each.wire) == (DEVICES, MESSAGE):
            resource, ids = read_devices(data, each.content, each.end)
            found.setdefault(resource, set()).update(ids)
        else:
            rest.append(data[each.start : each.end])
    return b"".join(rest), found


def read_devices(data: bytes, at: int, end: int) -> tuple[ResourceName, list[DeviceID]]:
    """Resource and devices of the message that stands there. Raises GRPCError where it is none."""
    found: dict[int, list[str]] = {RESOURCE: [""], DEVICE: []}
    for each in iterate_fields(data, at, end, v1.ContainerDevices):
        if each.number in found:
            if each.wire != MESSAGE:
                raise malformed_message(v1.ContainerDevices, "a field has another type")
            found[each.number].append(decode_text(v1.ContainerDevices, data[each.content : each.end]))
    return ResourceName(found[RESOURCE][-1]), [DeviceID(device) for device in found[DEVICE]]


def allocatable_devices(answer: bytes) -> Iterator[tuple[ResourceName, list[DeviceID]]]:
    """
    Yields the resource and devices of each message in an encoded AllocatableResourcesResponse, in its order. 17,500 shares
    are as many messages: 1.3 MB, half a second for the generated code and 17 MB of objects. So the answer stays encoded, and
    its messages are read one after the other. Raises GRPCError for bytes that are no such response.
    """
    for part in iterate_fields(answer, 0, len(answer), v1.AllocatableResourcesResponse):
        if part.number == 1:
            yield read_devices(answer, part.content, part.end)


Fields = frozenset[bytes]
"""
The encoded fields of an AllocatableResourcesResponse. A kubelet lists the devices of its maps in another order each time
(v1.36.3), so two answers are compared as sets.
"""


def read_changed_devices(
    data: bytes, known: Fields | None, left_out: tuple[bytes, ...] = ()
) -> tuple[Fields, v1.AllocatableResourcesResponse | None]:
    """
    Decodes an answer to GetAllocatableResources only if it has changed: its fields, and None if they are the `known` ones.
    The answer is polled, and for a node with 1,000 devices decoding takes 30 ms and comparing a tenth of that. `left_out`:
    the first bytes of messages in field 1 that are not wanted, such as a node's own thousands of shares. Raises GRPCError.
    """
    wanted = list(fields_without(data, left_out))
    fields = frozenset(wanted)
    if fields == known:
        return fields, None
    return fields, CODEC.decode(b"".join(wanted), v1.AllocatableResourcesResponse)


def fields_without(data: bytes, left_out: tuple[bytes, ...]) -> Iterator[bytes]:
    """The encoded fields of an answer, without messages in field 1 that begin like one of `left_out`. Raises GRPCError."""
    for each in iterate_fields(data, 0, len(data), v1.AllocatableResourcesResponse):
        if (each.number, each.wire) != (1, MESSAGE) or not data.startswith(left_out, each.content):
            yield data[each.start : each.end]
