"""
What of a node is reserved for a pod that its kubelet has not admitted yet.

A registry reserves what a node's decision will give the pod, before it binds the pod to the node.
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
"""Seconds; a reservation lasts tens of them. A forged message holds a node's devices no longer than this."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_RESERVATION)]


class ReservedContainer(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What is reserved for one container: what its allocations will be, as far as the node's decision is known."""

    container: ContainerName
    """Name of the container."""
    role: Role = "app"
    """Which kind of container it is: an init container, a sidecar (an init container that is restarted), or any other."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> devices that the container asks the kubelet for."""
    co_allocated: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> devices that the container gets together with its GPUs, without asking the kubelet for them."""
    needs_co_allocated: bool = False
    """Whether the container must not start without its co-allocated devices."""
    virtual_functions: dict[DeviceID, tuple[str, ...]] = {}
    """NIC among the devices -> PCI addresses of its SR-IOV virtual functions, where not the whole NIC is reserved."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory and hugepages that are its own."""
    slots: dict[DeviceID, Amount] = {}
    """Slot of a GPU among the devices -> what it will hold of that GPU by it. A slot that is not here: an equal part."""
    may_move: bool = False
    """Whether it may have slots of other GPUs with as much left, where the kubelet does not offer these."""

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
    """Its containers to which something is reserved, in the order in which they are decided."""
    seconds_left: Seconds
    """The reservation ends so many seconds after the message is received, by the reader's own monotonic clock."""
    gang: str = ""
    """The gang that the pod belongs to, `namespace/name`; empty: none."""
    planned: bool = False
    """Whether it was reserved with its gang and is not about to be bound yet: its kubelet does not ask for it."""
