"""
Reservations: devices, CPUs and memory of a node for a pod that the kubelet has not admitted yet.

Before a registry binds a pod to a node, it reserves what the node predicts for the pod.
`ReservationsChanged` (`events`) contains all reservations of a node.

Fields are never renamed or re-used, only added, as in `events`.
"""

from typing import Annotated

import msgspec

from topoalign.core.model.allocations import MemoryBlock, Role
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.topology.cpuset import parse_cpuset

LONGEST_RESERVATION = 3600.0
"""In seconds. A reservation usually lasts tens of seconds. The limit reduces the effect of a forged message."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_RESERVATION)]


class ReservedContainer(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What is reserved for one container: its predicted allocations."""

    container: ContainerName
    """Name of the container."""
    role: Role = "app"
    """The kind of container: an init container, a sidecar (a restartable init container), or an app container."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> devices that the container requests from the kubelet."""
    co_allocated: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> devices that the container gets together with its GPUs and does not request from the kubelet."""
    needs_co_allocated: bool = False
    """Whether the container must not start without its co-allocated devices."""
    virtual_functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of its reserved SR-IOV virtual functions. A NIC that is missing is reserved as a whole."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Exclusive memory and hugepages."""
    slots: dict[DeviceID, Amount] = {}
    """Slot in `devices` -> the reserved amount of its GPU. A slot that is missing stands for an equal part."""
    may_move: bool = False
    """Whether it may get slots of other GPUs with enough free capacity if the reserved ones are not offered."""

    def __post_init__(self) -> None:
        """Raises ValueError for a bad list of CPUs."""
        parse_cpuset(self.cpus)  # as for `Allocation`


class Reservation(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What is reserved for one pod on one node."""

    pod_uid: str
    """UID of the pod, which is bound to the node or about to be."""
    namespace: Namespace
    """Namespace of the pod."""
    pod: PodName
    """Name of the pod."""
    containers: tuple[ReservedContainer, ...]
    """Its containers with reserved resources, in the order of the decisions."""
    seconds_left: Seconds
    """Seconds from the receipt of the message to the end of the reservation, on the reader's monotonic clock."""
    gang: str = ""
    """The gang that the pod belongs to, `namespace/name`; empty: none."""
    planned: bool = False
    """Whether it is reserved with its gang and its bind has not begun: the kubelet does not request the devices yet."""
