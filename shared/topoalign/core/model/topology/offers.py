"""What of a node's hardware its device plugin offers to the kubelet, and the ids under which that is handed out."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from topoalign.core.model.ids import DeviceID, ResourceName

SHARE = "::"
"""Between a device and the number of its share, as NVIDIA's device plugin writes them (v0.20.0)."""

Kind = Literal["gpu", "nic", "part", "other"]
"""Whole GPUs; whole NICs; shares, MIG instances, virtual functions or a mixture; devices of another's plugin."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Devices of ours as they are offered to the kubelet: under which resource, whole or shared."""

    resource: ResourceName
    """Name of the extended resource, `nvidia.com/gpu`."""
    devices: tuple[DeviceID, ...]
    """What is handed out: uuids of GPUs or of MIG instances, names of NICs, PCI addresses of virtual functions."""
    replicas: int = 1
    """Above 1 each device is shared in time, and handed out as `<device>::0` to `<device>::<replicas - 1>`."""
    most: int | None = None
    """The largest number that a container may ask for. None: as many as there are."""
    packing: Literal["distributed", "packed"] = "distributed"
    """Of shares and MIG instances: from the cards of which the fewest, or the most, are held already."""


def base_of(device: DeviceID) -> DeviceID:
    """A device as handed out, without the number of its share: `GPU-x` of `GPU-x::3`."""
    return DeviceID(device.partition(SHARE)[0])


def handed_out(base: DeviceID, replicas: int) -> Iterator[DeviceID]:
    """The ids under which a device is handed out."""
    return iter((base,)) if replicas == 1 else (DeviceID(f"{base}{SHARE}{n}") for n in range(replicas))


def is_share(device: DeviceID) -> bool:
    return SHARE in device
