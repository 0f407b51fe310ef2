"""
The facts that topoalign publishes.

A fact is frozen, in the past tense, and has one writer: discovery publishes the hardware of a node, its allocator the
allocations. Only the reservations of a node are published by several registries. Facts arrive at least once and, per
writer and node, in order; `(node, epoch, seq)` identifies a repetition. Fields are never renamed or reused, only added.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from topoalign.core.model.allocations import Allocation as Allocation
from topoalign.core.model.allocations import Displaced as Displaced
from topoalign.core.model.allocations import MemoryBlock as MemoryBlock
from topoalign.core.model.allocations import MemoryUse as MemoryUse
from topoalign.core.model.allocations import Owner as Owner
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.kubelet import KubeletObserved as KubeletObserved
from topoalign.core.model.reservations import Reservation as Reservation
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology

DESCRIBED = "described: "
"""Prefix of `TopologyDiscovered.source` for a described machine."""

LARGEST_NUMBER = 2**53
"""Largest epoch, revision and seq. A reader that uses doubles for numbers can represent all of them exactly."""

Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]


class HealthState(StrEnum):
    """The health of a device as determined by discovery."""

    UNKNOWN = "unknown"
    """Not determined yet, or the driver does not answer. The device is listed to the kubelet as Unhealthy."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class DeviceHealth(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The health of one device, and whether an operator has cordoned it."""

    state: HealthState
    """`unknown`, `healthy` or `unhealthy`."""
    reason: str = ""
    """Why it is not healthy, for people: `GPU is lost`, `the driver has not answered for 5 s`."""
    cordoned: bool = False
    """Whether an operator has cordoned it. If so, it is not allocated, regardless of its state."""

    @property
    def usable(self) -> bool:
        """Whether the device can be allocated: it is healthy and not cordoned."""
        return self.state is HealthState.HEALTHY and not self.cordoned


HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all facts: their node, and the epoch of their writer."""

    node: NodeName
    """Name of the Kubernetes node."""
    epoch: Number
    """Changes with every start of the writer, and is never reused. All data is published again in the new epoch."""


class Reading(Fact, frozen=True, kw_only=True):
    """Base of facts that contain complete data, so only the newest one counts."""

    revision: Number
    """Increases within the epoch. The same number again is a repetition."""


class LedgerFact(Fact, frozen=True, kw_only=True):
    """Base of facts from the journal of a node's allocator."""

    seq: Number
    """Position in the journal, from 1, without gaps."""


class TopologyDiscovered(Reading, frozen=True, kw_only=True, tag="TopologyDiscovered"):
    """The complete hardware of a node. Published on start, on every change, and on request."""

    boot_id: str
    """The kernel's boot id: distinguishes a reboot from a restart of a service."""
    source: str
    """The source of the data: `nvml`, `sysfs`, or `described: <name>`."""
    topology: Topology
    """The hardware of the node that is online, and the resources in which it is offered."""

    @property
    def machine(self) -> str:
        """Name of the described machine; empty: real hardware. Nodes with the same one have the same device ids."""
        return self.source if self.source.startswith(DESCRIBED) else ""


class DeviceHealthChanged(Reading, frozen=True, kw_only=True, tag="DeviceHealthChanged"):
    """The health of every GPU and NIC, and of MIG instances whose health differs. Published on start and on change."""

    devices: dict[DeviceID, DeviceHealth]
    """Device id -> its health: all GPUs and NICs, and MIG instances whose health differs from that of their GPU."""


class ContainerUsage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Resources that the kubelet allocated to one container and that are in no allocation of topoalign."""

    owner: Owner
    """The container."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Exclusive memory and hugepages."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, in any order."""

    def __post_init__(self) -> None:
        parse_cpuset(self.cpus)  # as for `Allocation`


class MemoryExcess(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A container that used more memory of a device than was allocated to it, in three measurements in a row."""

    owner: Owner | None = None
    """The container. None: not known yet."""
    pod_uid: str = ""
    """UID of its pod; empty: unknown."""
    allocations: tuple[AllocationID, ...]
    """Ids of the allocations by which it holds the device."""
    device: DeviceID
    """The GPU or MIG instance."""
    given: int
    """Bytes of the device that are allocated to it."""
    used: int
    """Bytes that it used at the third measurement. `topoalign gpu usage` shows the present use."""


class UsageObserved(Reading, frozen=True, kw_only=True, tag="UsageObserved"):
    """
    Everything that the kubelet allocated without topoalign, and the rules by which it decides. Published within a
    second of a change, also when a container starts or stops using more memory of a GPU than was allocated to it.
    """

    containers: tuple[ContainerUsage, ...]
    """Every container to which the kubelet allocated something without topoalign."""
    containers_known: bool = True
    """False: `containers` is empty because PodResources has not answered since the allocator's start."""
    kubelet: KubeletObserved | None = None
    """The data of the kubelet that predictions depend on. None: not read yet."""
    exceeding: tuple[MemoryExcess, ...] = ()
    """Containers that use more memory of a GPU than was allocated to them."""


class AllocationGranted(LedgerFact, frozen=True, kw_only=True, tag="AllocationGranted"):
    """Devices were allocated to a container. The journal already has the fact, so it survives a restart of the node."""

    allocation: Allocation
    """The allocation. Its owner may not be known yet."""


class AllocationBound(LedgerFact, frozen=True, kw_only=True, tag="AllocationBound"):
    """The owner of an allocation became known, or is confirmed after a reboot."""

    allocation: AllocationID
    """Its id."""
    owner: Owner
    """The container that holds it."""
    boot: str = ""
    """The boot in which the kubelet reported the owner; empty: unknown."""
    pod_uid: str = ""
    """As `Allocation.pod_uid`. If it becomes known later than the names, the fact is published again."""
    displaced: tuple[Displaced, ...] = ()
    """Replaces `Allocation.displaced`. If some of its containers have ended, the fact is published again without them."""
    as_reserved: bool = False
    """Whether its slots have the reserved amounts. If so, `Allocation.reserved_for` and `.denied` become empty."""


class AllocationReleased(LedgerFact, frozen=True, kw_only=True, tag="AllocationReleased"):
    """A container no longer holds its allocation."""

    allocation: AllocationID
    """Its id."""
    reason: str
    """
    `released`: on request; `gone`: its container ended; `orphan`: its container ended while the allocator did not run;
    `superseded`: the kubelet allocated its devices to another container; `displaced`: the same, before the end of its
    own container was noticed; `other-machine`: the node simulates another described machine now.
    """


class AllocationRefused(LedgerFact, frozen=True, kw_only=True, tag="AllocationRefused"):
    """A pod that requested devices was refused; nothing changed."""

    namespace: Namespace
    """Namespace of the pod."""
    pod: PodName
    """Name of the pod."""
    container: ContainerName | None
    """The container that was refused. None: the pod as a whole."""
    reason: str
    """The kubelet's reason: TopologyAffinityError, SMTAlignmentError, UnexpectedAdmissionError."""
    code: str
    """Stable code of the reason: `NotAligned`, `NotEnoughDevices`."""
    finding: str
    """Why the pod was refused, for people."""
    remedy: str
    """What to do about it, for people."""


class AllocationDeviated(LedgerFact, frozen=True, kw_only=True, tag="AllocationDeviated"):
    """The kubelet did not allocate the preferred devices. The allocation has the devices that the kubelet chose."""

    allocation: AllocationID
    """Its id."""
    preferred: tuple[DeviceID, ...]
    """Device ids that were preferred."""
    allocated: tuple[DeviceID, ...]
    """Device ids that the kubelet chose."""


class AllocationsSnapshot(LedgerFact, frozen=True, kw_only=True, tag="AllocationsSnapshot"):
    """All live allocations of a node. Published on start, on request, and when the journal is compacted."""

    allocations: tuple[Allocation, ...]
    """Every live allocation."""
    memory: dict[int, MemoryUse] = {}
    """NUMA node id -> its memory in use. Empty on a node whose kubelet allocates the memory."""
    digest: str
    """The digest of all live allocations. A subscriber that folded all earlier facts has the same digest."""


class ReservationsChanged(Fact, frozen=True, kw_only=True, tag="ReservationsChanged"):
    """
    All reservations of a node after a change; the newest message replaces all earlier ones. Several registries publish it. A
    registry publishes only if its change is based on the newest message of the subject.
    """

    writer: str
    """Id of the registry replica that made the change. `epoch` and `seq` are its own."""
    seq: Number
    """Counts the writer's changes of all nodes in its epoch, from 1. The numbers of one node have gaps."""
    reservations: tuple[Reservation, ...]
    """Every reservation of the node."""
    made: tuple[str, ...] = ()
    """UIDs of pods whose reservation is new."""
    consumed: tuple[str, ...] = ()
    """UIDs of pods whose reservation has ended because the reserved devices were allocated."""
    expired: tuple[str, ...] = ()
    """UIDs of pods whose reservation has expired."""
    cancelled: tuple[str, ...] = ()
    """UIDs of pods that were deleted, were refused, or could not be bound."""


LedgerEvent = (
    AllocationGranted
    | AllocationBound
    | AllocationReleased
    | AllocationRefused
    | AllocationDeviated
    | AllocationsSnapshot
)
Event = TopologyDiscovered | DeviceHealthChanged | UsageObserved | LedgerEvent | ReservationsChanged
