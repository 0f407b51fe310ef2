"""
Counts the reserved memory of each NUMA node, as the kubelet's memory manager does (v1.36.3, policy Static).

A block of memory can be on several NUMA nodes. These nodes are a group while such a block exists, so the account counts
the blocks of each node. The functions return a new account and do not change their argument.
"""

from collections.abc import Mapping

from topoalign.core.model.events import Allocation, MemoryUse
from topoalign.core.model.ids import ResourceName


def add_allocation_memory(memory: Mapping[int, MemoryUse], allocation: Allocation) -> dict[int, MemoryUse]:
    """Returns the memory account with the allocation's blocks added."""
    after = dict(memory)
    for block in allocation.memory:
        for node, size in zip(block.nodes, block.taken, strict=True):
            use = after.get(node, MemoryUse())
            after[node] = MemoryUse(
                reserved=change_bytes(use.reserved, block.resource, size),
                cells=block.nodes,
                assignments=use.assignments + 1,
            )
    return after


def given_back(memory: Mapping[int, MemoryUse], allocation: Allocation) -> dict[int, MemoryUse]:
    """Returns the memory account without the allocation's blocks. Nodes without remaining blocks are omitted."""
    after = dict(memory)
    for block in allocation.memory:
        rest = sum(block.taken)
        for node, size in zip(block.nodes, block.taken, strict=True):
            use = after.get(node, MemoryUse())
            back = min(rest, use.reserved.get(block.resource, 0)) if allocation.lowest_first else size
            rest -= back
            assignments = max(0, use.assignments - 1)
            after[node] = MemoryUse(
                reserved=change_bytes(use.reserved, block.resource, -back),
                cells=use.cells if assignments else (),
                assignments=assignments,
            )
            if after[node] == MemoryUse():
                del after[node]
    return after


def change_bytes(reserved: Mapping[ResourceName, int], resource: ResourceName, by: int) -> dict[ResourceName, int]:
    """Returns the bytes per resource with `by` added to one. Zeros are omitted, so that equal states compare equal."""
    amounts = {**reserved, resource: max(0, reserved.get(resource, 0) + by)}
    return {name: amount for name, amount in amounts.items() if amount}
