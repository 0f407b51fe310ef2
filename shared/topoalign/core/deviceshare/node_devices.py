"""
Joint allocation on a node that topoalign knows: from a container's requests and its pod's annotations to device ids.

`nvidia.com/gpu` and `topoalign.io/nic` are whole devices; Koordinator's own resources can be asked for as well. A share of a
GPU is refused, because an allocation holds whole GPUs. A share of a NIC is one unit by a virtual function, with which others
may have the NIC's other functions; whatever else is asked of a NIC, it is given as a whole.
"""

import msgspec

from topoalign.core.deviceshare.allocate import Allocation, allocate
from topoalign.core.deviceshare.candidates import Asked, Chooser, Given, Wanted, wanted
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.names import FUNCTION, RDMA, DeviceType, Strategy
from topoalign.core.deviceshare.node_inventory import NOTHING, LeftOver, ids_of, inventory_of
from topoalign.core.deviceshare.refusals import DevicesDoNotFit
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.state.fold import NodeState

RESOURCE = {DeviceType.GPU: GPU, DeviceType.RDMA: NIC}
"""Under which resource devices of a type are held. There are no others on a node of ours."""


class ContainerDevices(msgspec.Struct, frozen=True):
    """What a container gets."""

    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """In the hardware's order; resources of which it gets nothing are absent."""
    functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of the virtual functions of it that are meant; absent where the NIC itself is."""
    companions: tuple[DeviceID, ...] = ()
    """Those of the devices that come with the others, without the kubelet being asked for them."""


def asked_of(state: NodeState, demand: JointDemand, left: LeftOver = NOTHING, chooser: Chooser | None = None) -> Asked:
    """A demand put to a node, on all of its NUMA nodes."""
    by_function = demand.hint(DeviceType.RDMA).vf_selector is not None
    return Asked(demand=demand, inventory=inventory_of(state, left, by_function=by_function), chooser=chooser)


def joint_devices(asked: Asked, affinity: Mask | None, *, spill: bool = False) -> ContainerDevices:
    """
    All GPUs and NICs of a container, on the NUMA nodes of `affinity` (None: anywhere).

    With `spill` devices of other nodes will do where those of the affinity do not, as for the kubelet's device manager.
    Raises DevicesDoNotFit, and TooMuchWork.
    """
    nodes = None if affinity is None else frozenset(nodes_of(affinity))
    try:
        return named(allocate(msgspec.structs.replace(asked, nodes=nodes)))
    except DevicesDoNotFit:
        if affinity is None or not spill:
            raise
        return named(allocate(msgspec.structs.replace(asked, nodes=None)))


def named(given: Allocation) -> ContainerDevices:
    """What is given, by ids instead of minors."""
    return ContainerDevices(
        devices={RESOURCE[kind]: ids_of(part.device for part in parts) for kind, parts in given.items()},
        functions={
            DeviceID(part.device.id): tuple(function.bus for function in part.functions)
            for parts in given.values()
            for part in parts
            if part.functions and is_function(part)
        },
    )


def is_function(given: Given | Wanted) -> bool:
    """Whether of the NIC only a function is meant."""
    units = given.resources if isinstance(given, Given) else given.each
    return units.get(RDMA) == FUNCTION


def holds(state: NodeState, demand: JointDemand, held: ContainerDevices) -> bool:
    """
    Whether a container that holds this holds what it asks for: exactly as many GPUs, and NICs as many or more, because it
    may have been given one for each place where it has GPUs.
    """
    asked = asked_of(state, demand)
    try:
        return all(holds_of(asked, kind, held) for kind in RESOURCE)
    except DevicesDoNotFit:
        return False  # the node has none of them any more


def holds_of(asked: Asked, kind: DeviceType, held: ContainerDevices) -> bool:
    """`holds` for the devices of one type. Raises DevicesDoNotFit where the node has none of them."""
    devices = held.devices.get(RESOURCE[kind], ())
    if kind not in asked.demand.requests:
        return not devices
    want, hint = wanted(asked, kind), asked.demand.hint(kind)
    if kind is DeviceType.GPU:
        return len(devices) == want.count
    least = 1 if hint.allocate_strategy == Strategy.APPLY_FOR_ALL else want.count
    functions = {*devices} if hint.vf_selector is not None and is_function(want) else set()
    return len(devices) >= least and functions == {*held.functions}
