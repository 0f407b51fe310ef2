"""
Allocates devices jointly on a node: from a container's requests and its pod's annotations to device ids.

`nvidia.com/gpu` and `topoalign.io/nic` are whole devices; Koordinator's own resources can be asked for as well. A share of a
GPU is so many units of a GPU that is offered in units (`node_units`). By Koordinator's names whole GPUs are those that are
offered whole, and on a node that offers none so, those in units of which nobody has any. A share of a NIC is one unit by a
virtual function, with which others may have the NIC's other functions; whatever else is asked of a NIC, it is given whole.
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
"""Under which resource devices of a type are held that are given whole. There are no others on a node of ours."""

LEAST_LEFT = DeviceScorer(DevicePacking.MOST_ALLOCATED, {CORE: 1, RATIO: 1})
"""A share goes to a GPU that has other shares."""
AS_KOORDINATOR = DeviceScorer()
"""As its scheduler reserves a share where its configuration sets nothing else: where the most is left."""


class ContainerDevices(msgspec.Struct, frozen=True):
    """What a container gets."""

    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """In the hardware's order; resources of which it gets nothing are absent."""
    functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of the virtual functions of it that are meant; absent where the NIC itself is."""
    co_allocated: tuple[DeviceID, ...] = ()
    """Those of the devices that come with the others, without the kubelet being asked for them."""


def check_shares_offered(topology: Topology, demand: JointDemand) -> None:
    """Raises SharesNeedUnits where parts of GPUs are asked for and no GPU is offered in units."""
    if demand.is_shared and not unit_resources_by_gpu(topology):
        raise SharesNeedUnits


def takes_units(topology: Topology, demand: JointDemand) -> bool:
    """Whether the GPUs that are asked for are given in units: parts of them, or whole ones where none are offered so."""
    if demand.gpu is None or demand.is_shared:
        return demand.is_shared
    if demand.by_whole_name or not unit_resources_by_gpu(topology):
        return False
    return topology.devices.get(GPU, NO_DEVICES).keys().isdisjoint(topology.gpu_by_id)


def resources_given(topology: Topology, demand: JointDemand) -> frozenset[ResourceName]:
    """The resources under which a container holds what it is given together."""
    if not takes_units(topology, demand):
        return frozenset(RESOURCE.values())
    return frozenset(name for names in unit_resources_by_gpu(topology).values() for name in names.values()) | {NIC}


def put_demand_to_node(
    state: NodeState, demand: JointDemand, left: LeftOver = NOTHING, chooser: Chooser | None = None
) -> JointRequest:
    """A demand put to a node, on all of its NUMA nodes. The `chooser` is for whole GPUs."""
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
    All GPUs and NICs of a container, on the NUMA nodes of `affinity` (None: anywhere), or with `spill` on others where these
    do not do, as for the kubelet's device manager. Raises DevicesDoNotFit and TooMuchWork.
    """
    nodes = None if affinity is None else frozenset(nodes_of(affinity))
    try:
        return _devices_by_id(asked, allocate_all_types(msgspec.structs.replace(asked, nodes=nodes)))
    except DevicesDoNotFit:
        if affinity is None or not spill:
            raise
        return _devices_by_id(asked, allocate_all_types(msgspec.structs.replace(asked, nodes=None)))


def _devices_by_id(asked: JointRequest, given: Allocation) -> ContainerDevices:
    """What is given, by ids instead of minors."""
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
    Whether a container that holds this holds what it asks for: exactly as many GPUs, or as much of each of as many, and NICs
    as many or more, because it may have been given one for each place where it has GPUs.
    """
    asked = put_demand_to_node(state, demand)
    try:
        return all(_holds_of(asked, kind, held) for kind in RESOURCE)
    except DevicesDoNotFit:
        return False  # the node has none of them any more


def _holds_of(asked: JointRequest, kind: DeviceType, held: ContainerDevices) -> bool:
    """`holds_demanded` for the devices of one type. Raises DevicesDoNotFit where the node has none of them."""
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
