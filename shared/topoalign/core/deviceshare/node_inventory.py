"""
Builds the inventory of a node from its topology, the health of its devices, and its allocations.

A device that an allocation holds is in use as a whole, unless the allocation holds only virtual functions of it. Other
functions of such a NIC can be allocated, but not the whole NIC. Of a GPU in units (`node_units`), all units that are
not free are in use. Selector labels are `model` for GPUs, and `name`, `linkLayer` and `state` for NICs, if known.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from topoalign.core.deviceshare.inventory import (
    ANYWHERE,
    HOPPER_TABLE,
    HOPPERS,
    DeviceLocation,
    FunctionGroup,
    InventoryDevice,
    InventoryFunction,
    NodeInventory,
    Table,
)
from topoalign.core.deviceshare.koordinator_names import CORE, FUNCTION, GPU_BYTES, RATIO, RDMA, WHOLE, DeviceType
from topoalign.core.deviceshare.node_units import GpuUnits, unit_resources_by_gpu
from topoalign.core.model.ids import GPU, NIC, DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.core.state.fold import NodeState

BELOW_A_ROOT_PORT = frozenset({PcieClass.PSB, PcieClass.PIX, PcieClass.PXB})
BELOW_A_ROOT_COMPLEX = BELOW_A_ROOT_PORT | {PcieClass.PHB}

_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.-]+")
_HOPPER = re.compile(rf"\b({'|'.join(HOPPERS)})\b")


class LeftOver(NamedTuple):
    """What containers of a pod can reuse from its init containers, although allocations still hold it."""

    devices: Collection[DeviceID] = ()
    functions: Collection[str] = ()
    """PCI addresses."""


NOTHING = LeftOver()


def inventory_of(
    state: NodeState,
    left: LeftOver = NOTHING,
    *,
    by_function: bool = False,
    units: Mapping[DeviceID, GpuUnits] | None = None,
    shared: bool = False,
) -> NodeInventory:
    """
    Builds the inventory of a node's GPUs and NICs from its state.

    If others hold some functions of a NIC, the NIC has one free unit (a function) for a pod that requests functions
    (`by_function`), and none for any other pod. `units`: the units of each GPU that can be allocated, as shares
    (`shared`) or as whole GPUs. None: the GPUs are those that are offered whole.
    """
    topology = state.hardware
    places = locate_devices(topology)
    held = state.ownership.held_whole.difference(left.devices)
    functions_held = state.ownership.functions_in_use.difference(left.functions)
    whole_gpus = topology.devices.get(GPU, NO_DEVICES)
    devices = []
    for gpu in topology.gpus:
        if units is not None and gpu.id in units:
            resources = units[gpu.id].total
            used = units[gpu.id].used(shared=shared)
            is_left = bool(units[gpu.id].left)
        elif units is None and gpu.id in whole_gpus:
            resources = {CORE: WHOLE, RATIO: WHOLE} | ({} if gpu.memory is None else {GPU_BYTES: gpu.memory})
            used = resources if gpu.id in held else {}
            is_left = gpu.id in left.devices
        else:
            continue
        device = InventoryDevice(
            kind=DeviceType.GPU,
            minor=gpu.index,
            id=gpu.id,
            healthy=state.health_of(gpu.id).usable,
            labels={"model": to_label_value(gpu.name)} if gpu.name else {},
            place=places.get(gpu.id),
            resources=resources,
            used=used,
            left=is_left,
        )
        devices.append(device)
    for nic in topology.nics:
        if nic.id not in topology.devices.get(NIC, NO_DEVICES):
            continue
        labels = _nic_labels(nic)
        functions = tuple(InventoryFunction(each.pci, number) for number, each in enumerate(nic.virtual_functions))
        addresses = frozenset(each.bus for each in functions)
        in_use = addresses & functions_held
        left_here = addresses.intersection(left.functions)
        used = {RDMA: WHOLE} if nic.id in held or in_use else {}
        if by_function and in_use and nic.id not in held:
            used = {RDMA: WHOLE - FUNCTION}
        device = InventoryDevice(
            kind=DeviceType.RDMA,
            minor=nic.index,
            id=nic.id,
            healthy=state.health_of(nic.id).usable,
            labels=labels,
            place=places.get(nic.id),
            resources={RDMA: WHOLE},
            groups=(FunctionGroup(labels, functions),) if functions else (),
            used=used,
            used_functions=in_use,
            left=nic.id in left.devices or bool(left_here),
            left_functions=left_here,
        )
        devices.append(device)
    return NodeInventory(devices=tuple(devices), table=koordinator_partition_table(topology))


def _nic_labels(nic: Nic) -> dict[str, str]:
    """The name, and the link layer and state if known. The state is ACTIVE if any port is active."""
    labels = {"name": to_label_value(nic.id)}
    layers = [port.link_layer for port in nic.ports if port.link_layer]
    states = [port.state for port in nic.ports if port.state]
    if layers:
        labels["linkLayer"] = to_label_value(layers[0])
    if states:
        labels["state"] = "ACTIVE" if "ACTIVE" in states else to_label_value(states[0])
    return labels


def to_label_value(text: str) -> str:
    """Converts text to a label value such as `NVIDIA-H100-80GB-HBM3`."""
    return _NOT_IN_LABELS.sub("-", text)[:63].strip("-_.")


def koordinator_partition_table(topology: Topology) -> Table | None:
    """Koordinator's built-in partition table if the machine has eight of its GPUs behind NVSwitches, else None."""
    hopper = all(gpu.switch_links and _HOPPER.search(gpu.name) for gpu in topology.gpus)
    return HOPPER_TABLE if hopper and [gpu.index for gpu in topology.gpus] == [*range(8)] else None


@computed_once
def locate_devices(topology: Topology) -> Mapping[DeviceID, DeviceLocation]:
    """GPU or NIC -> its location, by the bridges above it, else by its links. Absent: the location is unknown."""
    parents = {bridge.address: bridge.parent for bridge in topology.bridges}
    switches = group_by_links(topology, BELOW_A_ROOT_PORT)
    complexes = group_by_links(topology, BELOW_A_ROOT_COMPLEX)
    in_units = unit_resources_by_gpu(topology)
    places: dict[DeviceID, DeviceLocation] = {}
    devices: tuple[Gpu | Nic, ...] = (*topology.gpus, *topology.nics)
    for device in devices:
        chain = bridges_above(device.bridge, parents)
        pcie = chain[0] if chain else complexes.get(device.id, "")
        switch = (chain[1] if len(chain) > 1 else "") if chain else switches.get(device.id, "")
        # unknown for a device that is offered neither whole nor in units
        listed = topology.devices.get(GPU if isinstance(device, Gpu) else NIC, NO_DEVICES).get(device.id)
        nodes = topology.listed_nodes(device.numa_affinity) if device.id in in_units else listed
        node = nodes[0] if nodes else ANYWHERE
        if pcie or node != ANYWHERE:
            places[device.id] = DeviceLocation(node, pcie, switch)
    return places


def bridges_above(bridge: str | None, parents: Mapping[str, str | None]) -> list[str]:
    """The bridges above a device, the host bridge first."""
    chain: list[str] = []
    while bridge is not None and bridge not in chain:
        chain.append(bridge)
        bridge = parents.get(bridge)
    return chain[::-1]


def group_by_links(topology: Topology, classes: Collection[PcieClass]) -> Mapping[DeviceID, str]:
    """Device -> the name of its group of devices linked by these classes. Devices without a known link are absent."""
    known = [link for link in topology.links if link.pcie is not None]
    groups: dict[DeviceID, set[DeviceID]] = {each: {each} for link in known for each in (link.a, link.b)}
    for link in known:
        if link.pcie in classes and groups[link.a] is not groups[link.b]:
            joined = groups[link.a] | groups[link.b]
            groups.update(dict.fromkeys(joined, joined))
    return {device: f"with {min(group)}" for device, group in groups.items()}
