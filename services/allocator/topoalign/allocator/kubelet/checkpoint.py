"""
The file in which a kubelet keeps which devices it gave to whom: `kubelet_internal_checkpoint`.

It is JSON with a checksum that is not taken of the JSON: it is 32-bit FNV-1a over the text that Go's spew prints of the
data for hashing. So the text is printed here too.

Source: kubelet v1.36.3, cm/devicemanager/checkpoint and checkpointmanager/checksum.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from topoalign.core.errors import StateFault, clean

NAME = "kubelet_internal_checkpoint"
NO_NODE = -1
"""Stands for the NUMA node of a device without topology."""


class PodDevicesEntry(msgspec.Struct, frozen=True, rename="pascal"):
    """The devices of one resource that one container has."""

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[int, list[str]] = msgspec.field(name="DeviceIDs")
    """NUMA node id -> ids. A device with several nodes stands under each, one without topology under -1."""
    alloc_resp: bytes
    """The plugin's ContainerAllocateResponse as it was on the wire."""


class CheckpointData(msgspec.Struct, frozen=True, rename="pascal"):
    """All that the device manager remembers."""

    pod_device_entries: list[PodDevicesEntry] | None = None
    registered_devices: dict[str, list[str]] = {}
    """Resource -> healthy devices."""


class Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    """The file."""

    data: CheckpointData
    checksum: int


def encode(data: CheckpointData) -> bytes:
    return msgspec.json.encode(Checkpoint(data, checksum(data)))


def decode(content: bytes) -> CheckpointData:
    """Raises StateFault for anything that is not a checkpoint, or whose checksum is not its own."""
    try:
        checkpoint = msgspec.json.decode(content, type=Checkpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(clean(str(error), 200)) from error
    if checkpoint.checksum != checksum(checkpoint.data):
        raise damaged(f"its checksum is {checksum(checkpoint.data)}, and it says {checkpoint.checksum}")
    return checkpoint.data


def damaged(finding: str) -> StateFault:
    return StateFault(
        f"{NAME} cannot be trusted: {finding}", "remove it; pods that run keep their devices until they end"
    )


def load(directory: Path) -> CheckpointData:
    """What is remembered; nothing where there is no file. Raises StateFault."""
    try:
        return decode((directory / NAME).read_bytes())
    except FileNotFoundError:
        return CheckpointData()


def store(directory: Path, data: CheckpointData) -> None:
    """Puts it in place of what was there, at once or not at all."""
    scratch = directory / f".{NAME}"
    scratch.write_bytes(encode(data))
    os.replace(scratch, directory / NAME)


def checksum(data: CheckpointData) -> int:
    return fnv1a(printed(data).encode())


def fnv1a(content: bytes) -> int:
    """32-bit FNV-1a."""
    total = 0x811C9DC5
    for byte in content:
        total = (total ^ byte) * 0x01000193 & 0xFFFFFFFF
    return total


def printed(data: CheckpointData) -> str:
    """The data as spew prints it: map keys sorted, a type before each field, none before elements."""
    entries = data.pod_device_entries
    listed = "<nil>" if entries is None else f"[{' '.join(map(printed_entry, entries))}]"
    registered = printed_map((name, data.registered_devices[name]) for name in sorted(data.registered_devices))
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){listed} "
        f"RegisteredDevices:(map[string][]string){registered}}}"
    )


def printed_entry(entry: PodDevicesEntry) -> str:
    devices = printed_map((node, entry.device_ids[node]) for node in sorted(entry.device_ids))
    return (
        f"{{PodUID:(string){entry.pod_uid} ContainerName:(string){entry.container_name} "
        f"ResourceName:(string){entry.resource_name} DeviceIDs:(checkpoint.DevicesPerNUMA){devices} "
        f"AllocResp:([]uint8)[{' '.join(map(str, entry.alloc_resp))}]}}"
    )


def printed_map(items: Iterable[tuple[int | str, list[str]]]) -> str:
    return "map[" + " ".join(f"{key}:[{' '.join(ids)}]" for key, ids in items) + "]"
