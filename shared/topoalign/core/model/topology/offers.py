"""What of a node's hardware its device plugin offers to the kubelet. `holdings` knows the ids of it."""

from typing import Literal

import msgspec

from topoalign.core.model.ids import DeviceID, ResourceName

Kind = Literal["gpu", "nic", "part", "other"]
"""Whole GPUs; whole NICs; shares, MIG instances, virtual functions or a mixture; devices of another's plugin."""


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Devices of this node that are offered to the kubelet under one resource, whole or shared."""

    resource: ResourceName
    """Name of the extended resource, `nvidia.com/gpu`."""
    devices: tuple[DeviceID, ...]
    """What is handed out: uuids of GPUs or of MIG instances, names of NICs, PCI addresses of virtual functions."""
    replicas: int = 1
    """Above 1 each device is shared, and handed out as `<device>::0` to `<device>::<replicas - 1>`."""
    sharing: Literal["time-slicing", "mps"] = "time-slicing"
    """How shares are kept apart: in time, without limits, or by NVIDIA's MPS, each limited to an equal part."""
    most: int | None = None
    """The largest number that a container may ask for. None: as many as there are."""
    packing: Literal["distributed", "packed"] = "distributed"
    """Of shares and MIG instances: from the cards of which the fewest, or the most, are held already."""
