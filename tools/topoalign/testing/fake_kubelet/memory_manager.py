"""
The memory manager of the fake kubelet: the NUMA nodes of each container's memory, and its file.

It drops memory of pods that are gone when it is asked for hints and when it allocates, and at no other time. Each
change is two writes of the file, as upstream makes them; between the two, the totals of the NUMA nodes are ahead of, or
behind, the blocks. The decision about a container's memory is made by `topoalign.core`, and so are the totals.

Source: kubelet v1.36.3, cm/memorymanager (`removeStaleState`, `AddContainer`, `RemoveContainer`).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from topoalign.core.model.events import Allocation, MemoryBlock, MemoryUse
from topoalign.core.model.ids import AllocationID
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.memory_account import given_back
from topoalign.kubelet.files import memory_checkpoint
from topoalign.testing.fake_kubelet.files import machine_state, memory_file, nothing, replace

Blocks = Mapping[str, Mapping[str, tuple[MemoryBlock, ...]]]
"""Pod UID -> container -> blocks."""


class MemoryManager:
    """Loaded from its file when the kubelet starts."""

    def __init__(self, root: Path, machine: Topology, rules: AdmissionRules) -> None:
        """Raises StateFault for a file that does not suit the machine and the rules, unless it gives nothing away."""
        self.blocks: dict[str, dict[str, tuple[MemoryBlock, ...]]] = {}
        self.use: Mapping[int, MemoryUse] = {}
        """NUMA node id -> use, as `NodeState.memory`."""
        self.between: Callable[[], None] = nothing
        """Called between the two writes of a change."""
        self._file = root / memory_checkpoint.NAME
        self._machine = machine
        self._rules = rules
        known = memory_checkpoint.load_memory_state(root)
        if known is not None and known.blocks:
            memory_checkpoint.check_memory_state(known, machine, rules)
            for (uid, container), blocks in known.blocks.items():
                self.blocks.setdefault(uid, {})[container] = tuple(map(remembered, blocks))
            self.use = known.use
        self._write()

    def drop(self, active: frozenset[str] | None) -> None:
        """Drops what pods have that are not active. None: which pods are active is not known yet, so none is dropped."""
        gone = [uid for uid in self.blocks if active is not None and uid not in active]
        for uid in gone:
            self.release(uid, list(self.blocks[uid]))

    def use_without(self, gone: Iterable[str]) -> Mapping[int, MemoryUse]:
        """The account of the NUMA nodes once what these pods have is dropped."""
        use = self.use
        for uid in gone:
            for blocks in self.blocks.get(uid, {}).values():
                use = given_back(use, holding(blocks))
        return use

    def give(self, uid: str, given: Iterable[Allocation], use: Mapping[int, MemoryUse]) -> None:
        """
        What the containers of a pod have by now. The blocks of init containers shrink when later containers take their
        memory over. `use`: the account of the NUMA nodes with it.
        """
        blocks: dict[str, tuple[MemoryBlock, ...]] = {
            each.owner.container: each.memory for each in given if each.owner is not None and each.memory
        }
        if blocks:
            self.use = use
            self._write()
            self.between()
            self.blocks[uid] = blocks
            self._write()

    def release(self, uid: str, containers: Iterable[str]) -> None:
        """These containers have it no more: the pod is gone, or they are init containers that have ended."""
        pod = self.blocks.get(uid, {})
        for container in [name for name in containers if name in pod]:
            blocks = pod.pop(container)
            if not pod:
                del self.blocks[uid]
            self._write()
            self.between()
            self.use = given_back(self.use, holding(blocks))
            self._write()

    def _write(self) -> None:
        managed = self._rules.memory_manager == "Static"
        entries = {
            uid: {
                container: [
                    {"numaAffinity": block.nodes, "type": block.resource, "size": block.size} for block in blocks
                ]
                for container, blocks in containers.items()
            }
            for uid, containers in self.blocks.items()
        }
        nodes = machine_state(self._machine, self._rules, self.use) if managed else {}
        replace(self._file, memory_file(self._rules.memory_manager, nodes, entries))


def remembered(block: memory_checkpoint.MemoryCheckpointBlock) -> MemoryBlock:
    """The file does not tell how a block is spread over its NUMA nodes, and giving it back needs its size only."""
    nodes = tuple(block.numa_affinity)
    return MemoryBlock(resource=block.type, nodes=nodes, size=block.size, taken=(block.size, *(0 for _ in nodes[1:])))


def holding(blocks: tuple[MemoryBlock, ...]) -> Allocation:
    """An allocation of these blocks, given back as the kubelet does it."""
    return Allocation(id=AllocationID(""), memory=blocks, lowest_first=True)
