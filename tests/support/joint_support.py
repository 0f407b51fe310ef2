"""Small nodes and pods for tests of joint allocation, made by hand."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.demand import JointDemand, read_demand
from topoalign.core.deviceshare.inventory import (
    DeviceLocation,
    FunctionGroup,
    InventoryDevice,
    InventoryFunction,
    NodeInventory,
    Table,
)
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit
from topoalign.core.deviceshare.koordinator_names import (
    CORE,
    GPU_BYTES,
    HINT_ANNOTATION,
    JOINT_ANNOTATION,
    PARTITION_ANNOTATION,
    RATIO,
    RDMA,
    DeviceType,
)

GPU, NIC = DeviceType.GPU, DeviceType.RDMA
GIB = 1 << 30
GPUS, UNITS = "nvidia.com/gpu", RDMA
"""What is asked for: whole GPUs, and units of NICs."""

Spot = tuple[int, str] | tuple[int, str, str] | None
"""NUMA node, root complex and, where it is known, switch."""

ALL_GPU = {CORE: 100, RATIO: 100, GPU_BYTES: 80 * GIB}
ALL_NIC = {RDMA: 100}


def box(
    gpus: Sequence[Spot],
    nics: Sequence[Spot] = (),
    *,
    busy_gpus: Sequence[int] = (),
    busy_nics: Mapping[int, int] | None = None,
    sick: Sequence[tuple[DeviceType, int]] = (),
    functions: int = 0,
    table: Table | None = None,
) -> NodeInventory:
    """A node; `busy_nics` says how many units of a NIC are in use, `functions` how many virtual functions each has."""
    used = busy_nics or {}
    devices = [
        InventoryDevice(
            kind=kind,
            minor=minor,
            id=f"{kind}-{minor}",
            healthy=(kind, minor) not in sick,
            place=None if spot is None else DeviceLocation(*spot),
            resources=ALL_GPU if kind is GPU else ALL_NIC,
            groups=(vfs(minor, functions),) if functions and kind is NIC else (),
            used=(ALL_GPU if minor in busy_gpus else {}) if kind is GPU else {UNITS: used.get(minor, 0)},
        )
        for kind, spots in ((GPU, gpus), (NIC, nics))
        for minor, spot in enumerate(spots)
    ]
    return NodeInventory(devices=tuple(devices), table=table)


def vfs(nic: int, count: int) -> FunctionGroup:
    return FunctionGroup({}, tuple(InventoryFunction(f"0000:{nic:02x}:00.{i + 1}", i) for i in range(count)))


def demand(
    requests: Mapping[str, int],
    joint: object = None,
    hints: object = None,
    partition: object = None,
    *,
    compat: bool = False,
) -> JointDemand:
    said = {JOINT_ANNOTATION: joint, HINT_ANNOTATION: hints, PARTITION_ANNOTATION: partition}
    annotations = {key: json.dumps(value) for key, value in said.items() if value is not None}
    return read_demand(annotations, requests, compat=compat)


TOGETHER = {"deviceTypes": ["gpu", "rdma"]}
SAME_PCIE = {**TOGETHER, "requiredScope": "SamePCIe"}


def chosen(
    node: NodeInventory,
    requests: Mapping[str, int],
    *annotations: object,
    nodes: Sequence[int] | None = None,
    **more: Any,
) -> dict[str, list[int]] | str:
    """Type -> minors, or the reason of the refusal. `annotations` and `more`: as of `demand`."""
    pod = demand(requests, *annotations, **more)
    asked = JointRequest(demand=pod, inventory=node, nodes=None if nodes is None else frozenset(nodes))
    try:
        return {kind.value: [each.device.minor for each in given] for kind, given in allocate_all_types(asked).items()}
    except DevicesDoNotFit as misfit:
        return misfit.reasons[0]
