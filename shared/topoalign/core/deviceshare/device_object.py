"""
How Koordinator's Device object (`scheduling.koordinator.sh/v1alpha1`) is read.

It lists what the node has; what pods use is not in it, and is added by `Inventory.booked`.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import msgspec

from topoalign.core.deviceshare.annotations import quantity
from topoalign.core.deviceshare.inventory import (
    ANYWHERE,
    HOPPER_TABLE,
    HOPPERS,
    Device,
    Function,
    FunctionGroup,
    Inventory,
    Partition,
    Place,
    Table,
)
from topoalign.core.deviceshare.names import (
    GPU_MODEL,
    GPU_VENDOR,
    PARTITION_POLICY,
    PARTITION_TABLE,
    WELL_PLANNED,
    DeviceType,
)
from topoalign.core.model.errors import InvalidField, clean


class _Topology(msgspec.Struct, rename={"node": "nodeID", "pcie": "pcieID"}):
    node: int = ANYWHERE
    pcie: str = ""


class _Vf(msgspec.Struct, rename={"bus": "busID"}):
    bus: str
    minor: int = -1


class _VfGroup(msgspec.Struct):
    vfs: list[_Vf] = []
    labels: dict[str, str] = {}


class _Info(msgspec.Struct, rename={"groups": "vfGroups"}):
    type: str
    minor: int
    id: str = ""
    health: bool = False
    labels: dict[str, str] | None = None
    resources: dict[str, int] | None = None
    topology: _Topology | None = None
    groups: list[_VfGroup] | None = None


class _Partition(msgspec.Struct, rename="camel"):
    minors: tuple[int, ...]
    allocation_score: int = 0
    ring_bus_bandwidth: str | int | None = None


class _DeviceObject(msgspec.Struct):
    devices: list[_Info] = []
    labels: dict[str, str] = {}
    annotations: dict[str, Any] = {}


def read_device(raw: object, node_labels: Mapping[str, str] | None = None) -> Inventory:
    """
    Reads a Device object: its `devices`, `labels` and `annotations`, with quantities as integers.

    Devices of a type that is not known are left out. Raises InvalidField, which names the place.
    """
    try:
        described = msgspec.convert(raw, _DeviceObject)
        table = _table(described.annotations.get(PARTITION_TABLE))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidField(
            "device", clean(str(error), 200), "give the Device object as Koordinator writes it"
        ) from error
    labels = node_labels or {}
    policy = described.labels.get(PARTITION_POLICY) if table is not None else labels.get(PARTITION_POLICY)
    return Inventory(
        devices=tuple(_device(info) for info in described.devices if info.type in set(DeviceType)),
        table=table if table is not None else built_in_table(labels),
        honored=policy == "Honor",
        well_planned=described.labels.get(WELL_PLANNED) == "true",
    )


def built_in_table(labels: Mapping[str, str]) -> Table | None:
    """Koordinator's own partition table for the GPU model of these node labels; None if it has none."""
    nvidia = labels.get(GPU_VENDOR, "") in ("", "nvidia")
    return HOPPER_TABLE if nvidia and labels.get(GPU_MODEL) in HOPPERS else None


def _device(info: _Info) -> Device:
    place = None if info.topology is None else Place(info.topology.node, info.topology.pcie)
    groups = tuple(
        FunctionGroup(group.labels, tuple(Function(vf.bus, vf.minor) for vf in group.vfs))
        for group in info.groups or ()
    )
    return Device(
        kind=DeviceType(info.type),
        minor=info.minor,
        id=info.id,
        healthy=info.health,
        labels=info.labels or {},
        place=place,
        resources=info.resources or {},
        groups=groups,
    )


def _table(raw: object) -> Table | None:
    """The annotation, as the text it is or already decoded."""
    if raw is None:
        return None
    decoded = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    rows = msgspec.convert(decoded, dict[int, list[_Partition]], strict=False)
    return {
        size: tuple(Partition(row.minors, row.allocation_score, _bandwidth(row.ring_bus_bandwidth)) for row in listed)
        for size, listed in rows.items()
    }


def _bandwidth(text: str | int | None) -> Fraction | None:
    if text is None:
        return None
    if (found := quantity(text)) is None:
        raise ValueError(f"{text!r} is not a quantity")
    return found
