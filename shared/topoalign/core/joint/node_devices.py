"""
Joint allocation on a node that topoalign knows: from a container's requests and its pod's annotations to device ids.

`nvidia.com/gpu` and `topoalign.io/nic` are whole devices; Koordinator's own resources can be asked for as well. Whatever
share is asked for, the device is given as a whole, since an allocation holds whole devices.
"""

from collections.abc import Collection, Mapping

import msgspec

from topoalign.core.errors import InvalidField
from topoalign.core.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.joint.allocate import Allocation, allocate
from topoalign.core.joint.candidates import Asked
from topoalign.core.joint.demand import read_demand
from topoalign.core.joint.names import ANNOTATIONS, RDMA, WHOLE, DeviceType
from topoalign.core.joint.node_inventory import ids_of, inventory_of
from topoalign.core.joint.quantities import FIELD
from topoalign.core.joint.refusals import DevicesDoNotFit
from topoalign.core.state import NodeState
from topoalign.core.topology.bitmask import Mask, nodes_of

RESOURCE = {DeviceType.GPU: GPU, DeviceType.RDMA: NIC}
"""Under which resource devices of a type are held. There are no others on a node of ours."""


class JointDevices(msgspec.Struct, frozen=True):
    """What a container gets."""

    devices: dict[ResourceName, tuple[DeviceID, ...]]
    """In the hardware's order; resources of which it gets nothing are absent."""
    functions: dict[DeviceID, str]
    """NIC -> PCI address of the virtual function of it that is meant; absent where the NIC itself is."""


def is_joint(annotations: Mapping[str, str]) -> bool:
    """Whether a pod's devices are decided here."""
    return any(key in annotations for key in ANNOTATIONS)


def joint_devices(
    state: NodeState,
    annotations: Mapping[str, str],
    requests: Mapping[ResourceName, int],
    affinity: Mask | None,
    *,
    spill: bool = False,
    compat: bool = False,
    reusable: Collection[DeviceID] = (),
) -> JointDevices:
    """
    All GPUs and NICs of a container, on the NUMA nodes of `affinity` (None: anywhere).

    With `spill` devices of other nodes will do where those of the affinity do not, as for the kubelet's device manager.
    `reusable` devices are held by init containers of the pod. Raises InvalidField for annotations and requests that cannot
    be meant, DevicesDoNotFit, and TooMuchWork.
    """
    asked = Asked(
        demand=read_demand(annotations, in_units(requests), compat=compat),
        inventory=inventory_of(state, reusable),
        nodes=None if affinity is None else frozenset(nodes_of(affinity)),
    )
    try:
        return named(allocate(asked))
    except DevicesDoNotFit:
        if affinity is None or not spill:
            raise
        return named(allocate(msgspec.structs.replace(asked, nodes=None)))


def named(given: Allocation) -> JointDevices:
    return JointDevices(
        devices={RESOURCE[kind]: ids_of(part.device for part in parts) for kind, parts in given.items()},
        functions={
            DeviceID(part.device.id): function.bus
            for parts in given.values()
            for part in parts
            for function in part.functions
        },
    )


def in_units(requests: Mapping[ResourceName, int]) -> dict[str, int]:
    """The requests with whole NICs as units. Raises InvalidField where NICs are asked for in both ways."""
    units = {str(name): amount for name, amount in requests.items() if name != NIC}
    if requests.get(NIC):
        if units.get(RDMA):
            raise InvalidField(f"{FIELD}[{RDMA}]", f"asked for beside {NIC}", "ask for NICs under one of the two names")
        units[RDMA] = requests[NIC] * WHOLE
    return units
