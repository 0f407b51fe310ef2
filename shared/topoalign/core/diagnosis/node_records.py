"""
Reads and writes the known facts of a cluster, one record per node. All answers about it are computed from them.

A record has the newest reading of each kind, the live allocations, and the reservations for pods that the node has not
reported yet. `fold_record` folds them, so a record in a file gives the same answers on any machine and at any time.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from topoalign.core.demand.node_filters import NodeTraits
from topoalign.core.model.errors import BadRequest, InvalidField, clean
from topoalign.core.model.events import (
    AllocationsSnapshot,
    DeviceHealthChanged,
    ReservationsChanged,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import NodeName
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.model.topology.topology_checks import check_bounds
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The known facts of one node. A fact that was never received is None."""

    node: NodeName
    topology: TopologyDiscovered | None = None
    health: DeviceHealthChanged | None = None
    usage: UsageObserved | None = None
    allocations: AllocationsSnapshot | None = None
    """All live allocations."""
    reserved: tuple[Reservation, ...] = ()
    """Reservations that the node does not report yet. `seconds_left` is as of the time of the record."""
    silent: bool = False
    """Whether its allocator did not answer at the time of the record."""
    foreign: str = ""
    """Why topoalign does not use the node, as a code (`hami_nodes`). Empty: no other system allocates its GPUs."""
    traits: NodeTraits | None = None
    """Its labels, taints and cordon in Kubernetes. None: they were not read, or Kubernetes has no such node."""

    def __post_init__(self) -> None:
        """Raises ValueError for facts of another node."""
        facts = (self.topology, self.health, self.usage, self.allocations)
        if any(fact is not None and fact.node != self.node for fact in facts):
            raise ValueError("a fact of another node")


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The known facts of a cluster at one time."""

    time: float
    """Wall time in seconds."""
    nodes: tuple[NodeRecord, ...]
    """In the order of their names."""

    @property
    def has_traits(self) -> bool:
        """Whether the nodes were read from Kubernetes, so that the constraints of a pod can be applied."""
        return any(node.traits is not None for node in self.nodes)


def record_node(
    state: NodeState, reservations: ReservationsChanged | None = None, *, silent: bool = False
) -> NodeRecord:
    """The record of a node. `reservations`: the newest message, received now. `silent`: as in `NodeRecord`."""
    known = NodeReservations()
    if reservations is not None:
        known = known.apply(reservations, 1, 0.0).observe(state)
    allocations = None
    if state.epoch:
        allocations = AllocationsSnapshot(
            node=state.node,
            epoch=state.epoch,
            seq=state.seq,
            allocations=tuple(state.allocations.values()),
            memory=dict(state.memory),
            digest=state.digest,
        )
    return NodeRecord(
        node=state.node,
        topology=state.topology,
        health=state.health,
        usage=state.usage,
        allocations=allocations,
        reserved=known.held(0.0),
        silent=silent,
    )


def fold_record(record: NodeRecord) -> NodeState:
    """The fold of a record's facts."""
    state = NodeState(node=record.node, topology=record.topology, health=record.health, usage=record.usage)
    return state if record.allocations is None else state.apply(record.allocations)


# Records of a cluster as lines of JSON in a file: one line about the file, then one for each node.
#
#     {"kind": "topoalign.cluster", "version": 1, "time": 1800000000.0, "nodes": 2}
#     {"node": "gpu-1", "topology": {…}, "health": {…}, "usage": {…}, "allocations": {…}}
#
# The facts are those of docs/events.md. A file of 5,000 nodes has about 400 MB, so lines are read one by one.


KIND = "topoalign.cluster"
VERSION = 1
T = TypeVar("T")
LONGEST_LINE = 8 * 2**20
"""Bytes. The facts of a large node have some hundred thousand bytes."""
REMEDY = "give a file that `topoalign why --snapshot FILE` wrote"


class Heading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of the file."""

    kind: str
    version: int
    time: float
    """Wall time of the record in seconds."""
    nodes: int
    """Number of lines that follow. A truncated file is refused."""


def encode_lines(cluster: ClusterRecord) -> Iterator[bytes]:
    """The lines of a file, each with a line break at its end."""
    yield msgspec.json.encode(Heading(kind=KIND, version=VERSION, time=cluster.time, nodes=len(cluster.nodes))) + b"\n"
    for node in cluster.nodes:
        yield msgspec.json.encode(node) + b"\n"


def decode_lines(lines: Iterable[bytes]) -> ClusterRecord:
    """
    The records of a file. Equal machines share their shape. Raises InvalidField, which names the line, for an invalid
    line, for another kind or version of file, and for a file with missing lines.
    """
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (1, b""))
    heading = decode_line(1, first, Heading)
    if (heading.kind, heading.version) != (KIND, VERSION):
        raise line_error(1, f"{clean(heading.kind)!r} of version {heading.version}, not {KIND!r} of version {VERSION}")
    shapes = Shapes()
    nodes = dict[str, NodeRecord]()
    for number, line in numbered:
        record = decode_line(number, line, NodeRecord)
        if record.node in nodes:
            raise line_error(number, f"node {clean(record.node)!r} stands twice")
        if record.topology is not None:
            try:
                check_bounds(record.topology.topology)
            except BadRequest as error:
                raise line_error(number, error.finding) from error
            interned = shapes.interned(record.topology.topology)
            topology = msgspec.structs.replace(record.topology, topology=interned)
            record = msgspec.structs.replace(record, topology=topology)
        nodes[record.node] = record
    if len(nodes) != heading.nodes:
        raise line_error(len(nodes) + 1, f"{len(nodes)} nodes, and the first line announces {heading.nodes}")
    return ClusterRecord(time=heading.time, nodes=tuple(nodes[name] for name in sorted(nodes)))


def decode_line(number: int, line: bytes, kind: type[T]) -> T:
    """Decodes one line. Raises InvalidField."""
    if len(line) > LONGEST_LINE:
        raise line_error(number, f"more than {LONGEST_LINE} bytes")
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise line_error(number, clean(str(error), 200)) from error


def line_error(number: int, finding: str) -> InvalidField:
    """The error for an invalid line."""
    return InvalidField(f"line {number}", finding, REMEDY)
