"""
Reads Koordinator's Device object (`scheduling.koordinator.sh/v1alpha1`), as the suites `koordinator/…` describe nodes.

It says what there is; what pods use is not in it, and is added by `with_used`.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from topoalign.core.deviceshare.annotations import parse_quantity_exactly
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.inventory import HOPPER_TABLE, HOPPERS, InventoryDevice, NodeInventory, Partition, Table
from topoalign.core.deviceshare.koordinator_names import (
    PARTITION_TABLE,
    DeviceType,
)
from topoalign.core.model.errors import InvalidField, clean

LEFT_OUT = {"health": False}
"""What a device is in Go that says nothing else: fields with the zero value of their type are not written."""
SCORE_LEFT_OUT = {"allocationScore": 0}
"""The same of a partition."""


class DeviceObject(msgspec.Struct):
    """The parts of the object that are read; quantities are integers."""

    devices: list[dict[str, Any]] = []
    labels: dict[str, str] = {}
    annotations: dict[str, Any] = {}


PARTITION_POLICY = "node.koordinator.sh/gpu-partition-policy"
WELL_PLANNED = "node.koordinator.sh/secondary-device-well-planned"
GPU_MODEL = "node.koordinator.sh/gpu-model"
GPU_VENDOR = "node.koordinator.sh/gpu-vendor"


class DescribedInventory(NodeInventory, frozen=True, kw_only=True, dict=True):
    """The inventory of a Device object."""

    honored: bool = False
    """Whole GPUs are given as partitions of the table or not at all."""
    well_planned: bool = False
    """The node's secondary devices are enough for every choice of primary ones, so Koordinator's filter ignores them."""


def seen_by_filter(demand: JointDemand, inventory: DescribedInventory) -> JointDemand:
    """What Koordinator's filter looks at: for whole GPUs on a well-planned node, the primary type alone."""
    if not (demand.joint and inventory.well_planned and demand.gpu and not demand.is_shared):
        return demand
    primary = {kind: asked for kind, asked in demand.requests.items() if kind == demand.joint[0]}
    return msgspec.structs.replace(demand, requests=primary)


def read_device(raw: object, node_labels: Mapping[str, str]) -> DescribedInventory:
    """
    The inventory that a Device object describes. Devices of a type that is not known are left out.

    Raises InvalidField, which names the place.
    """
    try:
        described = msgspec.convert(raw, DeviceObject)
        known = [{**LEFT_OUT, **each} for each in described.devices if each.get("type") in [*DeviceType]]
        devices = msgspec.convert(known, tuple[InventoryDevice, ...])
        table = own_table(described.annotations.get(PARTITION_TABLE))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidField(
            "device", clean(str(error), 200), "give the Device object as Koordinator writes it"
        ) from error
    policy = (node_labels if table is None else described.labels).get(PARTITION_POLICY)
    return DescribedInventory(
        devices=devices,
        table=built_in_table(node_labels) if table is None else table,
        honored=policy == "Honor",
        well_planned=described.labels.get(WELL_PLANNED) == "true",
    )


def built_in_table(labels: Mapping[str, str]) -> Table | None:
    """Koordinator's own table, for nodes with the labels of the GPUs that it is for."""
    nvidia = labels.get(GPU_VENDOR, "") in ("", "nvidia")
    return HOPPER_TABLE if nvidia and labels.get(GPU_MODEL) in HOPPERS else None


def own_table(annotation: object) -> Table | None:
    """The table of the annotation, which is text or already decoded. Raises ValueError for another shape."""
    if annotation is None:
        return None
    raw = msgspec.json.decode(annotation) if isinstance(annotation, str) else annotation
    listed = msgspec.convert(raw, dict[int, list[dict[str, Any]]], strict=False)
    rows = {size: [{**SCORE_LEFT_OUT, **row} for row in partitions] for size, partitions in listed.items()}
    return msgspec.convert(rows, dict[int, tuple[Partition, ...]], strict=False, dec_hook=bandwidth)


def bandwidth(_: type[Fraction], text: Any) -> Fraction:
    """A quantity such as `200Gi`. Raises ValueError if it is none."""
    if (found := parse_quantity_exactly(text)) is None:
        raise ValueError(f"{text!r} is not a quantity")
    return found


def with_used(
    inventory: NodeInventory, kind: DeviceType, minor: int, resources: Mapping[str, int], functions: Iterable[str] = ()
) -> NodeInventory:
    """Returns the inventory with this much more of a device in use. Ignores devices that do not exist."""
    devices = tuple(
        msgspec.structs.replace(
            device,
            used={name: device.used.get(name, 0) + resources.get(name, 0) for name in {**device.used, **resources}},
            used_functions=device.used_functions | {*functions},
        )
        if (device.kind, device.minor) == (kind, minor)
        else device
        for device in inventory.devices
    )
    return msgspec.structs.replace(inventory, devices=devices)
