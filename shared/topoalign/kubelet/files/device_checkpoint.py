"""
Reads and writes the kubelet's file with the devices of each container: `device-plugins/kubelet_internal_checkpoint`.

Source: kubelet v1.36.3, cm/devicemanager/checkpoint.
"""

import os
from pathlib import Path

import msgspec

from topoalign.kubelet.files import checkpoint

NAME = "kubelet_internal_checkpoint"
NO_NODE = -1
"""Stands for the NUMA node of a device without topology."""


class PodDevicesEntry(msgspec.Struct, frozen=True, rename="pascal"):
    """The devices of one resource that one container has."""

    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[int, list[str]] = msgspec.field(name="DeviceIDs")
    """NUMA node id -> device ids. A device with several nodes is listed under each, one without topology under -1."""
    alloc_resp: bytes
    """The plugin's ContainerAllocateResponse, encoded."""

    def __str__(self) -> str:
        return (
            f"{{PodUID:(string){self.pod_uid} ContainerName:(string){self.container_name} "
            f"ResourceName:(string){self.resource_name} "
            f"DeviceIDs:(checkpoint.DevicesPerNUMA){checkpoint.spew_value(self.device_ids)} "
            f"AllocResp:([]uint8){checkpoint.spew_value(self.alloc_resp)}}}"
        )


class CheckpointData(msgspec.Struct, frozen=True, rename="pascal"):
    """The content of the device manager's file."""

    pod_device_entries: list[PodDevicesEntry] | None = None
    registered_devices: dict[str, list[str]] = {}
    """Resource -> healthy devices."""


class Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    """The file."""

    data: CheckpointData
    checksum: int


DECODER = msgspec.json.Decoder(Checkpoint)


def encode_device_checkpoint(data: CheckpointData) -> bytes:
    """The file's content, with its checksum, as the kubelet writes it."""
    return msgspec.json.encode(Checkpoint(data, checkpoint.fnv1a(spew_device_data(data))))


def decode_device_checkpoint(content: bytes) -> CheckpointData:
    """Decodes the file. Raises StateFault for an invalid checkpoint or a wrong checksum."""
    try:
        file = DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise checkpoint.damaged_file(NAME, checkpoint.undecoded(error)) from error
    checkpoint.expect_checksum(NAME, file.checksum, [spew_device_data(file.data)])
    return file.data


def load_devices(directory: Path) -> CheckpointData | None:
    """Reads the device manager's file; None without one. Raises StateFault."""
    content = checkpoint.read_checkpoint_file(directory / NAME)
    return None if content is None else decode_device_checkpoint(content)


def store(directory: Path, data: CheckpointData) -> None:
    """Replaces the device manager's file atomically."""
    scratch = directory / f".{NAME}"
    scratch.write_bytes(encode_device_checkpoint(data))
    os.replace(scratch, directory / NAME)


def spew_device_data(data: CheckpointData) -> str:
    """The data as go-spew prints it."""
    entries = checkpoint.spew_value(data.pod_device_entries)
    registered = checkpoint.spew_value(data.registered_devices)
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries} "
        f"RegisteredDevices:(map[string][]string){registered}}}"
    )
