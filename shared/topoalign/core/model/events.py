"""
The facts that topoalign publishes.

A fact is frozen, in the past tense, and published by one writer only: discovery publishes the hardware, the allocator
of a node what it gave away. Only reservations of a node are published by several registries. A subscriber may rely on
facts. Facts arrive at least once and, per writer and node, in order; `(node, epoch, seq)` distinguishes a repetition
from a new fact. Fields are never renamed or re-used, only added.
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
"""What `TopologyDiscovered.source` of a described machine begins with."""

LARGEST_NUMBER = 2**53
"""Of an epoch, a revision and a seq: up to here a reader whose numbers are doubles can represent each exactly."""

Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]


class HealthState(StrEnum):
    """The health of a device as discovery judges it."""

    UNKNOWN = "unknown"
    """Never judged, or its driver does not answer: offered to the kubelet as Unhealthy, but still listed."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class DeviceHealth(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The health of one device, and whether an operator has cordoned it."""

    state: HealthState
    """`unknown`, `healthy` or `unhealthy`."""
    reason: str = ""
    """Why it is not healthy, for people: `GPU is lost`, `the driver has not answered for 5 s`."""
    cordoned: bool = False
    """Kept back by an operator: not offered, whatever its state."""

    @property
    def usable(self) -> bool:
        """Whether the device may be handed out: it is healthy and not cordoned."""
        return self.state is HealthState.HEALTHY and not self.cordoned


HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all facts: the node that they are about, and the epoch of their writer."""

    node: NodeName
    """Name of the Kubernetes node."""
    epoch: Number
    """Changes when the writer's record starts afresh, as with every start of it; never repeats. The whole follows."""


class Reading(Fact, frozen=True, kw_only=True):
    """Base of facts of which only the newest counts, because each is complete by itself."""

    revision: Number
    """Counts up within the epoch. The same number again is a repetition."""


class LedgerFact(Fact, frozen=True, kw_only=True):
    """Base of facts from the journal of a node's allocator."""

    seq: Number
    """Position in the journal, from 1, without gaps."""


class TopologyDiscovered(Reading, frozen=True, kw_only=True, tag="TopologyDiscovered"):
    """The complete hardware of a node. Announced on start, on every change, and when asked."""

    boot_id: str
    """The kernel's boot id: distinguishes a reboot from a restart of a service."""
    source: str
    """What it was read by: `nvml`, `sysfs`, or `described: <name>`."""
    topology: Topology
    """All of the node's hardware that is online, and what of it is offered."""

    @property
    def machine(self) -> str:
        """Which described machine this is; empty: real hardware. Device ids of described machines repeat on others."""
        return self.source if self.source.startswith(DESCRIBED) else ""


class DeviceHealthChanged(Reading, frozen=True, kw_only=True, tag="DeviceHealthChanged"):
    """The health of every GPU and NIC, and of MIG instances with one of their own. Announced on start and on change."""

    devices: dict[DeviceID, DeviceHealth]
    """Device id -> its health. GPUs and NICs always, MIG instances only where they differ from their GPU."""


class ContainerUsage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What the kubelet gave one container that has no allocation, or gave beyond the container's allocations."""

    owner: Owner
    """The container."""
    cpus: str = ""
    """Exclusive CPUs as a list `0-3,8`; empty for a container in the shared pool."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory and hugepages that are its own."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    """Resource -> device ids, in no order that matters."""

    def __post_init__(self) -> None:
        parse_cpuset(self.cpus)  # as for `Allocation`


class MemoryExcess(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A container that used more memory of a device than it was given, in three measurements in a row."""

    owner: Owner | None = None
    """The container. None: not known yet."""
    pod_uid: str = ""
    """UID of its pod; empty: not known."""
    allocations: tuple[AllocationID, ...]
    """Ids of the allocations by which it holds the device."""
    device: DeviceID
    """The GPU or MIG instance."""
    given: int
    """Bytes that it was given of the device."""
    used: int
    """Bytes that it used at the third of these measurements. `topoalign gpu usage` shows what it uses now."""


class UsageObserved(Reading, frozen=True, kw_only=True, tag="UsageObserved"):
    """
    All that the kubelet gave out without asking topoalign, and the rules by which it decides. Announced within a second of a
    change, also when a container begins or ceases to use more memory of a GPU than it was given.
    """

    containers: tuple[ContainerUsage, ...]
    """Every container that the kubelet gave something to without asking us."""
    containers_known: bool = True
    """False: PodResources has not answered since the allocator's start, and `containers` is empty therefore."""
    kubelet: KubeletObserved | None = None
    """What predictions depend on. None: not read yet."""
    exceeding: tuple[MemoryExcess, ...] = ()
    """Containers that use more memory of a GPU than they were given; announced as an excess begins and ends."""


class AllocationGranted(LedgerFact, frozen=True, kw_only=True, tag="AllocationGranted"):
    """A container has been given its devices. The journal has it already: it holds even if the node stops now."""

    allocation: Allocation
    """What was given. Its owner may not be known yet."""


class AllocationBound(LedgerFact, frozen=True, kw_only=True, tag="AllocationBound"):
    """The container that holds an allocation has become known, or, after a reboot, that it holds it again."""

    allocation: AllocationID
    """Its id."""
    owner: Owner
    """The container that holds it."""
    boot: str = ""
    """The boot in which that was seen; empty: not known."""
    pod_uid: str = ""
    """As `Allocation.pod_uid`. Where it becomes known later than the names, the fact is announced again with it."""
    displaced: tuple[Displaced, ...] = ()
    """As `Allocation.displaced`, which this replaces: announced again without those that have ended."""
    as_reserved: bool = False
    """Whether its slots hold what was reserved for it, which empties `Allocation.reserved_for` and `.denied`."""


class AllocationReleased(LedgerFact, frozen=True, kw_only=True, tag="AllocationReleased"):
    """A container no longer holds its allocation."""

    allocation: AllocationID
    """Its id."""
    reason: str
    """
    `released` on request; `gone`: its container ended; `orphan`: it ended while the allocator did not run; `superseded`: the
    kubelet gave its devices to another container; `displaced`: it did so before the container was seen to end;
    `other-machine`: the node has another described machine now.
    """


class AllocationRefused(LedgerFact, frozen=True, kw_only=True, tag="AllocationRefused"):
    """A pod asked for devices and was refused; nothing changed."""

    namespace: Namespace
    """Namespace of the pod."""
    pod: PodName
    """Name of the pod."""
    container: ContainerName | None
    """Where it failed. None: the pod as a whole."""
    reason: str
    """The kubelet's reason: TopologyAffinityError, SMTAlignmentError, UnexpectedAdmissionError."""
    code: str
    """Stable code of the reason: `NotAligned`, `NotEnoughDevices`."""
    finding: str
    """What was found, for people."""
    remedy: str
    """What to do about it, for people."""


class AllocationDeviated(LedgerFact, frozen=True, kw_only=True, tag="AllocationDeviated"):
    """The kubelet gave other devices than were preferred. The allocation is as the kubelet chose."""

    allocation: AllocationID
    """Its id."""
    preferred: tuple[DeviceID, ...]
    """Device ids that were preferred."""
    allocated: tuple[DeviceID, ...]
    """Device ids that the kubelet chose."""


class AllocationsSnapshot(LedgerFact, frozen=True, kw_only=True, tag="AllocationsSnapshot"):
    """All live allocations of a node. Announced on start, when asked, and when the journal is compacted."""

    allocations: tuple[Allocation, ...]
    """Every live allocation."""
    memory: dict[int, MemoryUse] = {}
    """NUMA node id -> what is in use of it. Empty where the kubelet gives out memory by itself."""
    digest: str
    """The digest of all live allocations, which a subscriber has after every fact before this one."""


class ReservationsChanged(Fact, frozen=True, kw_only=True, tag="ReservationsChanged"):
    """
    All reservations of a node after a change; the newest message replaces all earlier ones. Several registries write, each
    only if the newest message of the subject is the one that its change is based on.
    """

    writer: str
    """Id of the registry replica that made the change. `epoch` and `seq` are its own."""
    seq: Number
    """Counts the changes of all nodes that the writer made in its epoch, from 1: those of one node have gaps."""
    reservations: tuple[Reservation, ...]
    """Every reservation of the node."""
    made: tuple[str, ...] = ()
    """UIDs of pods whose reservation is new."""
    consumed: tuple[str, ...] = ()
    """UIDs of pods whose reservation has ended because they have what was reserved."""
    expired: tuple[str, ...] = ()
    """UIDs of pods whose reservation has expired."""
    cancelled: tuple[str, ...] = ()
    """UIDs of pods that are gone, were refused, or could not be bound."""


LedgerEvent = (
    AllocationGranted
    | AllocationBound
    | AllocationReleased
    | AllocationRefused
    | AllocationDeviated
    | AllocationsSnapshot
)
Event = TopologyDiscovered | DeviceHealthChanged | UsageObserved | LedgerEvent | ReservationsChanged
