"""
The types of the HTTP API's responses. The reference of the API is `msgspec.json.schema` of these types.

Field names are part of the public contract: later versions can add fields but never rename them. A device is shown with
its index, id and PCI address. The objects of a row must not form reference cycles, because they are not
garbage-collected (`gc=False`).
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
    """Devices of one resource; `total` is the sum of the other three fields."""

    total: int
    free: int
    """Can be allocated whole now."""
    allocated: int
    """Held by a live allocation, healthy or not. A NIC counts as held if one of its virtual functions is held."""
    unhealthy: int
    """Not held and not allocatable: unhealthy, of unknown health, or cordoned."""


class CpuCount(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """CPUs of a node."""

    total: int
    exclusive: int
    """Allocated exclusively to a container."""


class NodeSummary(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A node in the list of nodes."""

    name: NodeName
    source: str | None
    """Source of the hardware: `nvml`, `sysfs`, `described: <name>`. None: not discovered yet."""
    revision: int | None
    """Revision of the topology, counted by discovery. None: not discovered yet."""
    boot_id: str | None
    gpus: int
    nics: int
    numa_nodes: int
    cpus: CpuCount
    resources: dict[ResourceName, ResourceCount]
    allocations: int
    epoch: int
    """Epoch of the allocator's journal; 0 before its first fact."""
    seq: int
    digest: str
    """Digest of the allocations, to compare two folds: it is equal for equal allocations."""
    stale: bool
    """Whether the node's allocator does not answer, so that no service confirms the data now."""
    last_event: str | None
    """RFC 3339 time of the newest fact."""
    foreign: str | None = None
    """`hami`: HAMi allocates its GPUs, and the node is offered to no pod. Missing: topoalign allocates them."""


class AllocationView(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One live allocation."""

    node: NodeName
    id: AllocationID
    owner: Owner | None
    """The container that holds it. None: still unknown."""
    role: str
    devices: tuple[NamedDevice, ...]
    """In the order in which the container sees them."""
    virtual_functions: dict[DeviceID, tuple[str, ...]]
    """NIC -> PCI addresses of its held virtual functions. A NIC without an entry is held as a whole."""
    cpus: str
    """Exclusive CPUs, such as `0-3,8`; empty if the container uses the shared pool."""
    memory: tuple[MemoryBlock, ...]
    affinity: tuple[int, ...] | None
    """Ids of the NUMA nodes to which it was aligned. None: the policy had no preference, or it is unknown."""
    since: str | None
    """RFC 3339 time of the grant. None: the grant was not received, only a snapshot with the allocation."""
    ailing: dict[DeviceID, DeviceHealth]
    """Device -> its health, for devices that would not be allocated now. They remain allocated."""
    amounts: dict[DeviceID, Amount] = {}
    """GPU -> amount of its units or slots. A slot without an amount counts as an equal part. Missing: it has none."""


class NodeDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The details of one node."""

    summary: NodeSummary
    topology: Topology | None
    health: dict[DeviceID, DeviceHealth]
    allocations: tuple[AllocationView, ...]
    hami: HamiView | None = None
    """HAMi's annotations of the Kubernetes Node. Missing: there are none."""


def summarize_member(member: ClusterNode, foreign: str | None = None) -> NodeSummary:
    """The summary of a node. `foreign`: the other system that allocates its GPUs; None: there is none."""
    counts = member.derived(summarize)
    last = rfc3339(member.last_event)
    return msgspec.structs.replace(counts, stale=not member.answering, last_event=last, foreign=foreign)


def summarize(state: NodeState) -> NodeSummary:
    """A summary with the fields that depend only on the state."""
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
    """The number of free, allocated and unhealthy devices of a resource."""
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
    """The details of a node that has published facts."""
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
    """Allocated devices of a node that would not be allocated now -> their health."""
    return {device: health for held in state.allocations.values() for device, health in state.ailing(held).items()}


def rfc3339(time: float | None) -> str | None:
    """Formats wall seconds as `2026-01-02T03:04:05.678Z`; None for None."""
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


ANSWER_SECONDS = 10.0
"""Timeout of a measurement: as long as the command line waits, and shorter than the timeouts of HTTP clients."""
LIBRARY_SECONDS = 3.0
"""Timeout of the request for the counts of limiter libraries. The response lacks them after a timeout."""


class SharedDevice(DeviceShares, frozen=True, kw_only=True):
    """A GPU or MIG instance, its holders and users, and the index and PCI address of its GPU."""

    index: int
    pci: str | None


class SharesView(msgspec.Struct, frozen=True, kw_only=True):
    """The use of all GPUs of one node."""

    node: NodeName
    measured: str | None
    """RFC 3339 time of the measurement."""
    stale: bool
    """Whether the node's allocator does not answer, so that no service confirms the holders now."""
    finding: str
    """Why it is unknown in which containers processes run; empty: it is known."""
    left_out: int
    """Processes that are not listed because there are too many."""
    library_finding: str
    """Why the counts of the limiter libraries are unknown; empty: they are known, or there are none."""
    items: tuple[SharedDevice, ...]


async def read_node_library(bus: Bus, member: ClusterNode) -> LibraryReading:
    """Requests the counts of a node's limiter libraries. Empty if there are none; only a finding after an error."""
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
    """Combines a measurement and the counts of limiter libraries with the current allocations of the node."""
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
