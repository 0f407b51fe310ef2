"""Which NUMA nodes memory comes from, and when there is none to come from."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.hints.memory_hints import MemoryNode, memory_hints
from topoalign.core.model.errors import NoFit
from topoalign.core.model.events import Allocation, MemoryBlock
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import MEMORY, AllocationID
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.placement.memory_blocks import choose_memory, from_lowest, hand_over_blocks

ANYWHERE = TopologyHint(None, True)


def nodes(*free: int, size: int = 10, group: int | None = None) -> dict[int, MemoryNode]:
    """NUMA nodes of this size with this much free; those with less than all free are in use, in `group` or alone."""
    return {i: MemoryNode({MEMORY: size}, {MEMORY: left}, group or 1 << i, left < size) for i, left in enumerate(free)}


def chosen(machine: dict[int, MemoryNode], amount: int, affinity: TopologyHint, reusable: Any = None) -> Any:
    """(nodes, taken) of the block, or the code of the error."""
    request, left = {MEMORY: amount}, reusable or {}
    own = memory_hints(machine, tuple(machine), request, left, Mode.KUBELET)
    try:
        (block,) = choose_memory(machine, request, left, affinity, lambda: own)
    except NoFit as misfit:
        assert misfit.finding and misfit.remedy
        return misfit.code
    return (block.nodes, block.taken)


@pytest.mark.parametrize(
    ("machine", "amount", "affinity", "expected"),
    [
        pytest.param(nodes(10, 10), 4, ANYWHERE, ((0,), (4,)), id="its own best"),
        pytest.param(nodes(2, 10), 4, ANYWHERE, ((1,), (4,)), id="its own best that is free"),
        pytest.param(nodes(10, 10), 4, TopologyHint(0b10, True), ((1,), (4,)), id="the affinity"),
        pytest.param(nodes(10, 10), 14, TopologyHint(0b11, True), ((0, 1), (10, 4)), id="the lowest node first"),
        pytest.param(nodes(10, 10), 14, TopologyHint(0b10, False), ((0, 1), (10, 4)), id="widened"),
        pytest.param(nodes(4, 4), 5, ANYWHERE, "NotEnoughMemory", id="no node has it, and none may be grouped"),
        pytest.param(nodes(4, 8, group=0b11), 9, ANYWHERE, "MemoryNotPreferred", id="only wider than preferred"),
        pytest.param(nodes(4, 4), 5, TopologyHint(0b01, True), "MemoryNotExtendable", id="nothing around the affinity"),
        pytest.param(
            nodes(4, 8, group=0b11), 9, TopologyHint(0b01, True), "MemoryExtensionNotPreferred", id="only a wider one"
        ),
        pytest.param(nodes(4, 10), 2, TopologyHint(0b11, True), "MemoryGroupsWouldMix", id="node 0 is in use alone"),
    ],
)
def test_where_memory_comes_from(
    machine: dict[int, MemoryNode], amount: int, affinity: TopologyHint, expected: object
) -> None:
    assert expected == chosen(machine, amount, affinity)


def test_reusable_memory_on_the_same_group_is_not_taken_anew() -> None:
    left = {(node_mask([0]), MEMORY): 3}

    assert ((0,), (2,)) == chosen(nodes(10, 10), 5, TopologyHint(0b01, True), left)
    assert ((1,), (5,)) == chosen(nodes(10, 10), 5, TopologyHint(0b10, True), left)


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 50))
def test_parts_add_up_to_what_is_wanted_or_all_there_is(amounts: list[int], wanted: int) -> None:
    parts = from_lowest(amounts, wanted)

    assert min(sum(amounts), wanted) == sum(parts)
    assert all(0 <= part <= amount for part, amount in zip(parts, amounts, strict=True))


def test_memory_taken_over_from_an_init_container_is_held_once() -> None:
    """The app container asks for 8 bytes and got 2 anew: 6 of the 7 of the init container become its own."""
    nodes = (0, 1)
    left = Allocation(
        id=AllocationID("init"), memory=(MemoryBlock(resource=MEMORY, nodes=nodes, size=7, taken=(4, 3)),)
    )
    got = Allocation(id=AllocationID("app"), memory=(MemoryBlock(resource=MEMORY, nodes=nodes, size=8, taken=(0, 2)),))

    giver, taker = hand_over_blocks(left, got)

    assert (MemoryBlock(resource=MEMORY, nodes=nodes, size=1, taken=(0, 1)),) == giver.memory
    assert (MemoryBlock(resource=MEMORY, nodes=nodes, size=8, taken=(4, 4)),) == taker.memory
