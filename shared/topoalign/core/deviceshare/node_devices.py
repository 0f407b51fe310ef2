"""
Allocates devices jointly on a node: from a container's requests and its pod's annotations to device ids.

`nvidia.com/gpu` and `topoalign.io/nic` are whole devices. Koordinator's resources can be requested as well. A share of
a GPU is a number of units of a GPU that is offered in units (`node_units`). A request for whole GPUs by Koordinator's
names gets GPUs that are offered whole. If the node offers no GPU whole, the request gets GPUs in units that have no
units in use. A share of a NIC is one unit in the form of a virtual function. Other pods can get the other functions of
the NIC. For any other request, a NIC is allocated whole.
"""

import msgspec

from topoalign.core.deviceshare.candidates import Chooser, JointRequest, count_wanted
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.device_scores import DevicePacking, DeviceScorer
from topoalign.core.deviceshare.joint_allocation import Allocation, allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, SharesNeedUnits
from topoalign.core.deviceshare.koordinator_names import CORE, FUNCTION, RATIO, RDMA, DeviceType, Strategy
from topoalign.core.deviceshare.node_inventory import NOTHING, LeftOver, inventory_of
from topoalign.core.deviceshare.node_units import amount_of_each_gpu, unit_resources_by_gpu, units_to_give
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

RESOURCE = {DeviceType.GPU: GPU, DeviceType.RDMA: NIC}
"""Device type -> the resource under which whole devices of this type are held. A node has no devices of other types."""

LEAST_LEFT = DeviceScorer(DevicePacking.MOST_ALLOCATED, {CORE: 1, RATIO: 1})
"""Prefers GPUs that already have shares."""
AS_KOORDINATOR = DeviceScorer()
"""The default of Koordinator's scheduler: prefers the GPU with the most free."""


class ContainerDevices(msgspec.Struct, frozen=True):
    """The devices that a container gets."""

    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """In the hardware's order. Resources of which the container gets no devices are absent."""
    functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of its virtual functions that the container gets. Absent if it gets the whole NIC."""
    co_allocated: tuple[DeviceID, ...] = ()
    """The devices that are allocated with the others, without a request to the kubelet."""


def check_shares_offered(topology: Topology, demand: JointDemand) -> None:
    """Raises SharesNeedUnits if shares of GPUs are requested and no GPU is offered in units."""
    if demand.is_shared and not unit_resources_by_gpu(topology):
        raise SharesNeedUnits


def takes_units(topology: Topology, demand: JointDemand) -> bool:
    """Whether the requested GPUs are allocated in units: shares, or whole GPUs if the node offers no GPU whole."""
    if demand.gpu is None or demand.is_shared:
        return demand.is_shared
    if demand.by_whole_name or not unit_resources_by_gpu(topology):
        return False
    return topology.devices.get(GPU, NO_DEVICES).keys().isdisjoint(topology.gpu_by_id)


def resources_given(topology: Topology, demand: JointDemand) -> frozenset[ResourceName]:
    """The resources under which a container holds its jointly allocated devices."""
    if not takes_units(topology, demand):
        return frozenset(RESOURCE.values())
    return frozenset(name for names in unit_resources_by_gpu(topology).values() for name in names.values()) | {NIC}


def put_demand_to_node(
    state: NodeState, demand: JointDemand, left: LeftOver = NOTHING, chooser: Chooser | None = None
) -> JointRequest:
    """A demand as a request to a node, on all of its NUMA nodes. The `chooser` is for whole GPUs."""
    by_function = demand.hint(DeviceType.RDMA).vf_selector is not None
    shared = demand.is_shared
    units = units_to_give(state, left.devices) if takes_units(state.hardware, demand) else None
    inventory = inventory_of(state, left, by_function=by_function, units=units, shared=shared)
    asked = JointRequest(demand=demand, inventory=inventory, units=units)
    if shared:
        return msgspec.structs.replace(asked, scorer=AS_KOORDINATOR if demand.compat else LEAST_LEFT)
    return msgspec.structs.replace(asked, chooser=chooser)


def joint_devices(asked: JointRequest, affinity: Mask | None, *, spill: bool = False) -> ContainerDevices:
    """
    All GPUs and NICs of a container, on the NUMA nodes of `affinity` (None: all NUMA nodes). With `spill`, on all NUMA
    nodes if those do not have enough, as the kubelet's device manager does. Raises DevicesDoNotFit and TooMuchWork.
    """
    nodes = None if affinity is None else frozenset(nodes_of(affinity))
    try:
        return _devices_by_id(asked, allocate_all_types(msgspec.structs.replace(asked, nodes=nodes)))
    except DevicesDoNotFit:
        if affinity is None or not spill:
            raise
        return _devices_by_id(asked, allocate_all_types(msgspec.structs.replace(asked, nodes=None)))


def _devices_by_id(asked: JointRequest, given: Allocation) -> ContainerDevices:
    """The granted devices, by id instead of minor."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    functions: dict[DeviceID, tuple[str, ...]] = {}
    for kind, parts in given.items():
        for part in parts:
            device = DeviceID(part.device.id)
            new: dict[ResourceName, tuple[DeviceID, ...]] = {RESOURCE[kind]: (device,)}
            if asked.units is not None and kind is DeviceType.GPU:
                assert asked.demand.gpu is not None, "GPUs are given to whoever asks for some"
                new = asked.units[device].given(asked.demand.gpu)
            for name, some in new.items():
                devices[name] = (*devices.get(name, ()), *some)
            if part.functions and part.resources.get(RDMA) == FUNCTION:
                functions[device] = tuple(function.bus for function in part.functions)
    return ContainerDevices(devices=devices, functions=functions)


def holds_demanded(state: NodeState, demand: JointDemand, held: ContainerDevices) -> bool:
    """
    Whether a container holds what it requests: exactly the requested number of GPUs, and at least that of NICs. NICs
    can be more, because each place of GPUs can get one.
    """
    asked = put_demand_to_node(state, demand)
    try:
        return all(_holds_of(asked, kind, held) for kind in RESOURCE)
    except DevicesDoNotFit:
        return False  # the node no longer has any of them


def _holds_of(asked: JointRequest, kind: DeviceType, held: ContainerDevices) -> bool:
    """`holds_demanded` for the devices of one type. Raises DevicesDoNotFit if the node has none of them."""
    devices = held.devices.get(RESOURCE[kind], ())
    if kind not in asked.demand.requests:
        return not devices
    want = count_wanted(asked, kind)
    gpu = asked.demand.gpu
    if kind is DeviceType.GPU and gpu is not None:
        units = asked.units
        if units is None:
            return len(devices) == want.count
        amounts = amounts_of(unit for some in held.devices.values() for unit in some)
        are_equal = all(
            each in units and amount == amount_of_each_gpu(gpu, units[each].all_blocks)
            for each, amount in amounts.items()
        )
        return GPU not in held.devices and len(amounts) == gpu.count and are_equal
    hint = asked.demand.hint(kind)
    least = 1 if hint.allocate_strategy == Strategy.APPLY_FOR_ALL else want.count
    by_function = hint.vf_selector is not None and want.each.get(RDMA) == FUNCTION
    return len(devices) >= least and ({*devices} if by_function else set()) == {*held.functions}
