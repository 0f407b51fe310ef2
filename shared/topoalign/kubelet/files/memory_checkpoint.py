"""
Reads the kubelet's file with the memory of each container: `memory_manager_state`.

It contains a table for each NUMA node, and the memory blocks of each container. A table has the allocated amount of
each resource, and the group of nodes with which the node was last used. If tables and blocks do not agree, or the
tables do not fit the machine and its configuration, the kubelet rejects the file when it starts.

Source: kubelet v1.36.3, cm/memorymanager/state and the static policy's check of its state.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from topoalign.core.hints.memory_hints import memory_node
from topoalign.core.model.errors import clean, quoted
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import checkpoint
from topoalign.kubelet.files.checkpoint import Envelope, damaged_file

NAME = "memory_manager_state"

Amount = Annotated[int, msgspec.Meta(ge=0)]


class MemoryTable(msgspec.Struct, frozen=True, rename="camel"):
    """One resource of one NUMA node, in bytes."""

    total: Amount
    system_reserved: Amount
    allocatable: Amount
    reserved: Amount
    """Held by containers."""
    free: Amount

    def __str__(self) -> str:
        return (
            f"<*>{{TotalMemSize:(uint64){self.total} SystemReserved:(uint64){self.system_reserved} "
            f"Allocatable:(uint64){self.allocatable} Reserved:(uint64){self.reserved} Free:(uint64){self.free}}}"
        )


class NumaNodeState(msgspec.Struct, frozen=True, rename="camel"):
    """One NUMA node."""

    number_of_assignments: Amount
    memory_map: dict[ResourceName, MemoryTable]
    cells: list[int] | None = None
    """The group of nodes with which the node was last used, including the node. Empty: the node alone."""

    def __str__(self) -> str:
        return (
            f"<*>{{NumberOfAssignments:(int){self.number_of_assignments} "
            f"MemoryMap:(map[v1.ResourceName]*state.MemoryTable){checkpoint.spew_value(self.memory_map)} "
            f"Cells:([]int){checkpoint.spew_value(self.cells)}}}"
        )


class MemoryCheckpointBlock(msgspec.Struct, frozen=True, rename="camel"):
    """The amount of one resource that a container has."""

    numa_affinity: list[Amount]
    type: ResourceName
    size: Amount

    def __str__(self) -> str:
        nodes = checkpoint.spew_value(self.numa_affinity)
        return f"{{NUMAAffinity:([]int){nodes} Type:(v1.ResourceName){self.type} Size:(uint64){self.size}}}"


class MemoryManagerState(Envelope, frozen=True, kw_only=True, rename="camel"):
    """The file."""

    policy_name: str
    machine_state: dict[int, NumaNodeState] | None
    entries: dict[str, dict[str, list[MemoryCheckpointBlock] | None]] | None = {}
    """Pod uid -> container -> blocks."""

    @property
    def nodes(self) -> dict[int, NumaNodeState]:
        """NUMA node id -> its tables."""
        return self.machine_state or {}

    @property
    def blocks(self) -> dict[tuple[str, str], list[MemoryCheckpointBlock]]:
        """(pod uid, container) -> blocks."""
        return {
            (uid, container): blocks or []
            for uid, containers in (self.entries or {}).items()
            for container, blocks in containers.items()
        }

    @property
    def use(self) -> dict[int, MemoryUse]:
        """As in `NodeState.memory`. A node without reserved memory and without assignments is absent."""
        uses = {
            node: MemoryUse(
                reserved={name: table.reserved for name, table in state.memory_map.items() if table.reserved},
                cells=tuple(state.cells or [node]) if state.number_of_assignments else (),
                assignments=state.number_of_assignments,
            )
            for node, state in self.nodes.items()
        }
        return {node: use for node, use in sorted(uses.items()) if use != MemoryUse()}

    @property
    def lost(self) -> dict[ResourceName, int]:
        """
        Resource -> bytes that the NUMA nodes have allocated, but no container has.

        Such bytes exist between the two writes of a change. They remain if the kubelet releases a block of a group of
        NUMA nodes, one of which was also used alone, because a block is returned to the lowest node of its group first.
        For example, one container has 1 byte of node 0, and another has a block of 4 bytes of the group 0-1, allocated
        on node 1. Releasing the block frees 1 byte on node 0 and 3 on node 1. Releasing the other container then finds
        nothing on node 0, and 1 byte of node 1 is lost. Source: kubelet v1.36.3, RemoveContainer of the static policy.
        """
        given, held = sum_memory(self)
        return {name: given[name] - held[name] for name in sorted(given) if given[name] > held[name]}

    def without(self, pods: Collection[str]) -> "MemoryManagerState":
        """
        The state after the manager has released the memory of these pods, one pod at a time in the order of their UIDs.

        Each block is returned to the lowest NUMA node of its group first, up to the amount allocated there. It also
        ends one assignment of each node of its group. A node without assignments is no longer in a group. If 6 bytes of
        node 0 and 4 of node 1 are allocated, releasing a block of 8 bytes of both leaves 0 and 2. Source: kubelet
        v1.36.3, RemoveContainer of the static policy.
        """
        nodes = dict(self.nodes)
        for (uid, _), blocks in sorted(self.blocks.items()):
            for block in blocks if uid in pods else ():
                give_back(block, nodes)
        kept = {uid: containers for uid, containers in (self.entries or {}).items() if uid not in pods}
        return msgspec.structs.replace(self, machine_state=nodes, entries=kept)


def give_back(block: MemoryCheckpointBlock, nodes: dict[int, NumaNodeState]) -> None:
    """Changes `nodes` as the memory manager does when it releases a block (`MemoryManagerState.without`)."""
    rest = block.size
    for number in block.numa_affinity:
        node = nodes[number]
        assignments = max(0, node.number_of_assignments - 1)
        tables = node.memory_map
        if (table := tables.get(block.type)) is not None:
            back = min(rest, table.reserved)
            rest -= back
            table = msgspec.structs.replace(table, reserved=table.reserved - back, free=table.free + back)
            tables = {**tables, block.type: table}
        cells = node.cells if assignments else [number]
        nodes[number] = NumaNodeState(number_of_assignments=assignments, memory_map=tables, cells=cells)


DECODER = msgspec.json.Decoder(MemoryManagerState)


def load_memory_state(root: Path) -> MemoryManagerState | None:
    """Reads the state of the kubelet with this root directory; None without a file. Raises StateFault."""
    content = checkpoint.read_checkpoint_file(root / NAME)
    return None if content is None else decode_memory_checkpoint(content)


def decode_memory_checkpoint(content: bytes) -> MemoryManagerState:
    """Decodes the file. Raises StateFault for an invalid or inconsistent checkpoint, or a wrong checksum."""
    state = checkpoint.decode_checkpoint(NAME, content, DECODER)
    if state.checksum:
        checkpoint.expect_checksum(NAME, state.checksum, spew_memory_state(state))
    for node, each in state.nodes.items():
        for name, table in each.memory_map.items():
            adds_up = table.reserved + table.free == table.allocatable
            if not adds_up or table.allocatable + table.system_reserved > table.total:
                raise damaged_file(NAME, f"{clean(name)} of NUMA node {node} does not add up")
        group = each.cells or [node]
        if node not in group or group != sorted(set(group)) or not state.nodes.keys() >= set(group):
            raise damaged_file(NAME, f"NUMA node {node} cannot be in the group {format_cpuset(group[:64])}")
        if len(group) > 1 and not each.number_of_assignments:
            raise damaged_file(NAME, f"NUMA node {node} is in a group, and nothing is assigned to it")
    for (uid, container), blocks in state.blocks.items():
        for block in blocks:
            group = block.numa_affinity
            if not group or group != sorted(set(group)) or not state.nodes.keys() >= set(group):
                raise damaged_file(NAME, f"memory of container {quoted([container])} of pod {quoted([uid])} is nowhere")
    given, held = sum_memory(state)
    for name in sorted(held):
        if given[name] < held[name]:  # containers can have less than is allocated (`MemoryManagerState.lost`)
            finding = f"containers hold {held[name]} bytes of {clean(name)}, the NUMA nodes gave {given[name]}"
            raise damaged_file(NAME, finding)
    return state


def spew_memory_state(state: MemoryManagerState) -> Iterator[str]:
    """The data as go-spew prints it, with the structs of all releases."""
    nodes = checkpoint.spew_value(state.machine_state)
    entries = checkpoint.spew_value(state.entries)
    pod_level = " PodEntries:(state.PodMemoryAssignments)map[]"
    for version, more in (("", ""), ("V1", ""), ("", pod_level), ("V2", pod_level)):
        yield (
            f"(*state.MemoryManagerCheckpoint{version}){{PolicyName:(string){state.policy_name} "
            f"MachineState:(state.NUMANodeMap){nodes} Entries:(state.ContainerMemoryAssignments){entries}{more} "
            "Checksum:(checksum.Checksum)0}"
        )


def sum_memory(state: MemoryManagerState) -> tuple[Counter[ResourceName], Counter[ResourceName]]:
    """Resource -> bytes that the NUMA nodes have allocated, and resource -> bytes that containers have."""
    given: Counter[ResourceName] = Counter()
    for node in state.nodes.values():
        given.update({name: table.reserved for name, table in node.memory_map.items()})
    held: Counter[ResourceName] = Counter()
    for blocks in state.blocks.values():
        for block in blocks:
            held[block.type] += block.size
    return given, held


def check_memory_state(state: MemoryManagerState, topology: Topology, rules: AdmissionRules) -> None:
    """Raises StateFault if this cannot be the state of a kubelet with these rules on this machine."""
    if state.policy_name != rules.memory_manager:
        finding = f"it was kept under policy {quoted([state.policy_name])}, and {rules.memory_manager!r} is configured"
        raise damaged_file(NAME, finding)
    if rules.memory_manager == "None":
        return
    if state.nodes.keys() != set(topology.node_ids):
        have = format_cpuset(topology.node_ids)
        recorded = format_cpuset(state.nodes)
        raise damaged_file(NAME, f"it has NUMA nodes {recorded}, and the machine has {have}")
    for node in topology.nodes:
        if node.memory is None:
            continue  # nothing can be compared, and a request for memory will be refused for that
        expected = memory_node(node, rules.reserved_memory.get(node.id, {}), MemoryUse()).allocatable
        found = {name: table.allocatable for name, table in state.nodes[node.id].memory_map.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name, 0) != found.get(name, 0):
                finding = (
                    f"NUMA node {node.id} has {found.get(name, 0)} bytes of {clean(name)} to give by it, and "
                    f"{expected.get(name, 0)} by the machine and the kubelet's configuration"
                )
                raise damaged_file(NAME, finding)
