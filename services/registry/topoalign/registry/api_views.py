"""
The types of the HTTP API's answers; `msgspec.json.schema` of these types is its reference.

Field names are part of the public contract: later versions add fields and never rename one. A device has its index, its id
and its PCI address together. The objects of each row are in no cycle of references (`gc=False`).
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import Allocation, DeviceHealth, MemoryBlock, Owner
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.model.processes import LibraryReading, Measurement
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.device_names import NamedDevice, named_devices
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus
from topoalign.core.sharing.hami.node_annotations import UNKNOWN_NUMA, HamiLiveness
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import held_by_slot, sum_amounts
from topoalign.core.usage.attribution import DeviceShares, attribute_use, has_library, with_library
from topoalign.registry.cluster_nodes import ClusterNode, bare
from topoalign.registry.foreign_nodes import HAMI, ForeignNodes, HamiView


class ResourceCount(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Devices of one resource; `sum_amounts` is the sum of the other three."""

    total: int
    free: int
    """May be allocated whole now."""
    allocated: int
    """Held by a live allocation, healthy or not; a NIC of which one virtual function is held is held."""
    unhealthy: int
    """Not held and not allocatable: unhealthy, of unknown health, or cordoned."""


class CpuCount(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """CPUs of a node."""

    total: int
    exclusive: int
    """Allocated to one container alone."""


class NodeSummary(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One line of the list of nodes."""

    name: NodeName
    source: str | None
    """Source of the hardware: `nvml`, `sysfs`, `described: <name>`. None: not discovered yet."""
    revision: int | None
    """Of the topology, counted by discovery."""
    boot_id: str | None
    gpus: int
    nics: int
    numa_nodes: int
    cpus: CpuCount
    resources: dict[ResourceName, ResourceCount]
    allocations: int
    epoch: int
    """Of the allocator's journal; 0 before its first fact."""
    seq: int
    digest: str
    """Equal for equal allocations: compare it with the digest of another fold."""
    stale: bool
    """The node's allocator does not answer: what is shown was true, and no service confirms it now."""
    last_event: str | None
    """RFC 3339 time of the newest fact."""
    foreign: str | None = None
    """`hami`: HAMi allocates its GPUs, and the node is offered to no pod. Missing: topoalign allocates them."""


class AllocationView(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One live allocation."""

    node: NodeName
    id: AllocationID
    owner: Owner | None
    """None: it is not known yet for which container."""
    role: str
    devices: tuple[NamedDevice, ...]
    """In the order in which the container sees them."""
    virtual_functions: dict[DeviceID, tuple[str, ...]]
    """NIC -> PCI addresses of its virtual functions that are held; without an entry the whole NIC is."""
    cpus: str
    """Exclusive CPUs as a list `0-3,8`; empty in the shared pool."""
    memory: tuple[MemoryBlock, ...]
    affinity: tuple[int, ...] | None
    """NUMA node ids it was aligned to. None: no preference, or not known from the kubelet."""
    since: str | None
    """RFC 3339 time of the grant. None: it was received in a snapshot only."""
    ailing: dict[DeviceID, DeviceHealth]
    """Health of the devices that would not be allocated now; it keeps them."""
    amounts: dict[DeviceID, Amount] = {}
    """GPU -> amount of its units or slots; of a slot without an amount an equal part. Missing: it has none."""


class NodeDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The details of one node."""

    summary: NodeSummary
    topology: Topology | None
    health: dict[DeviceID, DeviceHealth]
    allocations: tuple[AllocationView, ...]
    hami: HamiView | None = None
    """HAMi's annotations of the Kubernetes Node. Missing: there are none."""


def summarize_member(member: ClusterNode, foreign: str | None = None) -> NodeSummary:
    """The summary of a node. `foreign`: who else allocates its GPUs."""
    counts = member.derived(summarize)
    last = rfc3339(member.last_event)
    return msgspec.structs.replace(counts, stale=not member.answering, last_event=last, foreign=foreign)


def summarize(state: NodeState) -> NodeSummary:
    """The fields of a summary that depend on the state alone."""
    discovered = state.topology
    return NodeSummary(
        name=state.node,
        source=discovered.source if discovered is not None else None,
        revision=discovered.revision if discovered is not None else None,
        boot_id=discovered.boot_id if discovered is not None else None,
        gpus=len(state.hardware.gpus),
        nics=len(state.hardware.nics),
        numa_nodes=len(state.hardware.nodes),
        cpus=CpuCount(total=len(state.hardware.cpus), exclusive=len(state.ownership.cpus_in_use)),
        resources={resource: count(state, resource) for resource in state.hardware.devices},
        allocations=len(state.allocations),
        epoch=state.epoch,
        seq=state.seq,
        digest=state.digest,
        stale=True,
        last_event=None,
    )


def count(state: NodeState, resource: ResourceName) -> ResourceCount:
    """How many devices of a resource are free, allocated and unhealthy."""
    devices = state.hardware.devices[resource]
    free = len(state.ownership.free(resource))
    allocated = len(state.ownership.held(resource))
    return ResourceCount(total=len(devices), free=free, allocated=allocated, unhealthy=len(devices) - free - allocated)


def foreign_summary(foreign: ForeignNodes, node: NodeName) -> NodeSummary:
    """The summary of a node that only HAMi manages, with the GPUs that HAMi has registered."""
    gpus = foreign.gpus(node)
    return msgspec.structs.replace(
        summarize(NodeState(node=node)),
        gpus=len(gpus),
        numa_nodes=len({gpu.numa for gpu in gpus} - {UNKNOWN_NUMA}),
        allocations=foreign.pods(node),
        digest="",
        stale=foreign.liveness(node) is not HamiLiveness.LIVE,
        foreign=HAMI,
    )


def detail(
    member: ClusterNode,
    allocations: tuple[AllocationView, ...],
    foreign: str | None = None,
    hami: HamiView | None = None,
) -> NodeDetail:
    """The details of a node with facts."""
    state = bare(member.state)
    return NodeDetail(
        summary=summarize_member(member, foreign),
        topology=state.topology.topology if state.topology is not None else None,
        health={device: state.health_of(device) for devices in state.hardware.devices.values() for device in devices},
        allocations=allocations,
        hami=hami,
    )


def allocation_views(member: ClusterNode, live: Iterable[Allocation]) -> Iterator[AllocationView]:
    """The views of allocations of one node."""
    hardware = member.state.hardware.without_tables()
    unusable = member.derived(ailing)
    for allocation in live:
        ids = {device for devices in allocation.devices.values() for device in devices}
        yield AllocationView(
            node=member.state.node,
            id=allocation.id,
            owner=allocation.owner,
            role=allocation.role,
            devices=named_devices(hardware, allocation.devices),
            virtual_functions=allocation.virtual_functions,
            cpus=allocation.cpus,
            memory=allocation.memory,
            affinity=allocation.affinity,
            since=rfc3339(member.since.get(allocation.id)),
            ailing={device: unusable[device] for device in sorted(ids & unusable.keys())},
            amounts={
                **allocation.amounts,
                **{
                    gpu: sum_amounts(slots.values())
                    for gpu, slots in held_by_slot(member.state.hardware, (allocation,)).items()
                },
            },
        )


def ailing(state: NodeState) -> dict[DeviceID, DeviceHealth]:
    """The devices in allocations of a node that would not be allocated now, with their health."""
    return {device: health for held in state.allocations.values() for device, health in state.ailing(held).items()}


def rfc3339(time: float | None) -> str | None:
    """Wall seconds as `2026-01-02T03:04:05.678Z`."""
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


ANSWER_SECONDS = 10.0
"""For a measurement: as long as the command line waits, and below the time-outs of clients."""
LIBRARY_SECONDS = 3.0
"""For the counts of libraries, which are left out otherwise."""


class SharedDevice(DeviceShares, frozen=True, kw_only=True):
    """A GPU or MIG instance, who holds it and who uses it, with the index and PCI address of its GPU."""

    index: int
    pci: str | None


class SharesView(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of one node."""

    node: NodeName
    measured: str | None
    """RFC 3339 time."""
    stale: bool
    """The node's allocator does not answer: the holders were true, and no service confirms them now."""
    finding: str
    """Why it is not known where processes run; empty: it is known."""
    left_out: int
    """Processes that are not listed because there are too many."""
    library_finding: str
    """Why the counts of the libraries that limit containers are not known; empty: they are, or there are none."""
    items: tuple[SharedDevice, ...]


async def read_node_library(bus: Bus, member: ClusterNode) -> LibraryReading:
    """Asks for the counts of the libraries that limit a node's containers; empty if there are none or none answers."""
    state = bare(member.state)
    if not has_library(state):
        return LibraryReading(node=state.node)
    question = msgspec.json.encode(NodeRequest(node=state.node))
    try:
        return wire.decode_answer(
            await bus.ask(wire.admission_subject(state.node, "library-use"), question, within=LIBRARY_SECONDS),
            LibraryReading,
        )
    except TopoalignError as error:
        return LibraryReading(node=state.node, finding=error.finding)


def shares_view(member: ClusterNode, measurement: Measurement, reading: LibraryReading) -> SharesView:
    """The measurement of a node's discovery and the counts of libraries, with the node's allocations now."""
    state = bare(member.state)
    shares = with_library(attribute_use(state, measurement), reading)
    gpus = state.hardware.gpu_by_id
    return SharesView(
        node=shares.node,
        measured=rfc3339(shares.time),
        stale=not member.answering,
        finding=shares.finding,
        left_out=shares.left_out,
        library_finding=shares.library_finding,
        items=tuple(
            SharedDevice(
                **{name: getattr(row, name) for name in DeviceShares.__struct_fields__},
                index=gpus[row.gpu].index,
                pci=gpus[row.gpu].pci,
            )
            for row in shares.devices
        ),
    )
