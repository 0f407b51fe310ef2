"""
Decodes the answers of the kubelet's PodResources, which consist mostly of devices.

The kubelet lists each device in a separate message, with its resource and its NUMA nodes (v1.36.3). For 16 containers,
each with 20 units of GPU time and 60 units of GPU memory, there are 1,280 such messages, and the generated code takes
40 ms to decode them. So this module reads the resources and device IDs, in a seventh of that time, and skips the NUMA
nodes. The generated code decodes the rest.

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
"""Field numbers: the pods in the answer, the containers in a pod, the devices in a container."""
RESOURCE = 1
DEVICE = 2
"""Field numbers in ContainerDevices."""
MESSAGE = 2
"""The wire type of messages and strings."""


def read_listed_pods(data: bytes) -> tuple[v1.ListPodResourcesResponse, list[Devices]]:
    """
    Decodes an answer to List. Returns it without devices, and the devices of each container, in the order of the
    answer. Raises GRPCError for an invalid answer.
    """
    devices: list[Devices] = []
    rest = b"".join(
        field(PODS, read_pod(data, each.content, each.end, devices))
        if (each.number, each.wire) == (PODS, MESSAGE)
        else data[each.start : each.end]
        for each in iterate_fields(data, 0, len(data), v1.ListPodResourcesResponse)
    )
    return CODEC.decode(rest, v1.ListPodResourcesResponse), devices


def read_pod(data: bytes, at: int, end: int, devices: list[Devices]) -> bytes:
    """The encoded pod in `data[at:end]` without its devices. Appends the devices of each container to `devices`."""
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
    """The encoded container in `data[at:end]` without its devices, and its devices."""
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
    """The resource and devices of the message in `data[at:end]`. Raises GRPCError for an invalid message."""
    found: dict[int, list[str]] = {RESOURCE: [""], DEVICE: []}
    for each in iterate_fields(data, at, end, v1.ContainerDevices):
        if each.number in found:
            if each.wire != MESSAGE:
                raise malformed_message(v1.ContainerDevices, "a field has another type")
            found[each.number].append(decode_text(v1.ContainerDevices, data[each.content : each.end]))
    return ResourceName(found[RESOURCE][-1]), [DeviceID(device) for device in found[DEVICE]]


def allocatable_devices(answer: bytes) -> Iterator[tuple[ResourceName, list[DeviceID]]]:
    """
    Yields the resource and devices of each message in an encoded AllocatableResourcesResponse, in its order.

    17,500 shares are 17,500 messages: 1.3 MB, which the generated code decodes in half a second into 17 MB of objects.
    So the answer stays encoded, and its messages are read one by one. Raises GRPCError for an invalid answer.
    """
    for part in iterate_fields(answer, 0, len(answer), v1.AllocatableResourcesResponse):
        if part.number == 1:
            yield read_devices(answer, part.content, part.end)


Fields = frozenset[bytes]
"""
The encoded fields of an AllocatableResourcesResponse. The kubelet keeps devices in maps, so their order differs between
answers (v1.36.3). Two answers are therefore compared as sets.
"""


def read_changed_devices(
    data: bytes, known: Fields | None, left_out: tuple[bytes, ...] = ()
) -> tuple[Fields, v1.AllocatableResourcesResponse | None]:
    """
    Decodes an answer to GetAllocatableResources if it has changed. Returns its fields, and the decoded answer, or None
    if the fields are equal to `known`. `left_out`: messages in field 1 that begin with one of these bytes are skipped,
    such as the node's own thousands of shares. Raises GRPCError for an invalid answer.

    The answer is polled. For a node with 1,000 devices, decoding takes 30 ms, and comparing a tenth of that.
    """
    wanted = list(fields_without(data, left_out))
    fields = frozenset(wanted)
    if fields == known:
        return fields, None
    return fields, CODEC.decode(b"".join(wanted), v1.AllocatableResourcesResponse)


def fields_without(data: bytes, left_out: tuple[bytes, ...]) -> Iterator[bytes]:
    """Encoded fields of an answer, without messages in field 1 that begin with any of `left_out`. Raises GRPCError."""
    for each in iterate_fields(data, 0, len(data), v1.AllocatableResourcesResponse):
        if (each.number, each.wire) != (1, MESSAGE) or not data.startswith(left_out, each.content):
            yield data[each.start : each.end]
