"""The suites `gaia/…`: the tree of gpu-manager 8cd842ed and the cards that it chooses; `gaia/admission` is beside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.sharing.gaia import evaluators
from topoalign.core.sharing.gaia.pcie_tree import (
    GaiaTreeNode,
    GpuTree,
    build_free_tree,
    build_pcie_tree,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import NONE_HELD
from topoalign.tools.conformance import gaia_admission
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.gaia_admission import Amounts, request_of
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite


class Machine(msgspec.Struct, frozen=True):
    """The cards of a case, by index."""

    minors: list[int]
    total_memory_bytes: list[int]
    multi_gpu_board: list[int]
    levels: list[list[int]]


class Occupancy(msgspec.Struct, frozen=True):
    """What of a card is used when a case begins."""

    used_cores: int
    used_memory_blocks: int
    processes: int


class ExpectedCards(msgspec.Struct, frozen=True):
    """The minors of the cards that are given, in any of these orders, or an error."""

    devices: list[int] | None = None
    any_of: list[list[int]] | None = None
    error: str | None = None


class EvaluatorCase(msgspec.Struct, frozen=True):
    """A case of `gaia/evaluators`."""

    id: str
    via: Literal["dispatch", "evaluator"]
    evaluator: Literal["link", "fragment", "share", ""]
    topology: Machine
    occupancy: list[Occupancy]
    request: Amounts
    expect: ExpectedCards


class ShapedNode(msgspec.Struct, frozen=True, order=True):
    """A node of the tree that a case expects."""

    depth: int
    level: int
    members: list[int]
    parent_members: list[int]


class Shape(msgspec.Struct, frozen=True):
    """The tree that a case expects."""

    root_members: list[int]
    nodes: list[ShapedNode]


class ShapeCase(msgspec.Struct, frozen=True):
    """A case of `gaia/tree_shape`."""

    id: str
    topology: Machine
    expect: Shape


class Operation(Amounts, frozen=True):
    """What happens to a card."""

    op: Literal["occupy", "free"]
    minor: int


class TreeState(msgspec.Struct, frozen=True):
    """What the cards of a tree have left, by index, and which of them are free."""

    cores: list[int]
    memory_bytes: list[int]
    available: int
    available_minors: list[int]


class OperationsCase(msgspec.Struct, frozen=True):
    """A case of `gaia/tree_ops`."""

    id: str
    topology: Machine
    ops: list[Operation]
    expect_after_each_op: list[TreeState]


def evaluators_suite(path: Path) -> Iterator[CaseResult]:
    """The results of a case file of `gaia/evaluators`."""
    return results(path, EvaluatorCase, chosen_cards)


def chosen_cards(case: EvaluatorCase) -> Outcome:
    """The cards of a request, or the refusal; any of the listed answers passes."""
    tree = empty_tree(case.topology)
    used = [
        msgspec.structs.replace(card, processes=occupied.processes)
        for card, occupied in zip(tree.gpus, case.occupancy, strict=True)
    ]
    tree = build_free_tree(tree.root, used)
    for at, occupied in enumerate(case.occupancy):
        if occupied.used_cores or occupied.used_memory_blocks:
            tree = occupy(tree, at, occupied.used_cores, occupied.used_memory_blocks * MEMORY_BLOCK)
    request = request_of(case.request)
    expected = case.expect
    got = answer(case, tree, request)
    if isinstance(got, evaluators.GaiaRefusal):
        return expected, ExpectedCards(error=got.value)
    minors = [card.minor for card in got]
    return expected, expected if minors in (expected.any_of or []) else ExpectedCards(devices=minors)


def answer(case: EvaluatorCase, tree: GpuTree, request: Amount) -> evaluators.Chosen | evaluators.GaiaRefusal:
    """The cards by the evaluator that the request asks for, or by the one that the case names; or why there are none."""
    count = request.cores // CORES
    if case.via == "dispatch":
        return evaluators.evaluate(tree, request)
    if case.evaluator == "share":
        chosen = evaluators.share(tree, request.cores, request.memory)
    else:
        chosen = (evaluators.choose_linked_gpus if case.evaluator == "link" else evaluators.fragment)(tree, count)
    return chosen or evaluators.GaiaRefusal.NO_FREE_GPU


def tree_shape(path: Path) -> Iterator[CaseResult]:
    """The results of a case file of `gaia/tree_shape`."""
    return results(path, ShapeCase, shape)


def shape(case: ShapeCase) -> Outcome:
    """All nodes of the tree, as the cases sort them."""
    root = empty_tree(case.topology).root
    nodes = sorted(shaped(root), key=lambda node: (node.depth, -node.level, node.members[0]))
    return case.expect, Shape([*root.members], nodes)


def shaped(node: GaiaTreeNode, depth: int = 1) -> Iterator[ShapedNode]:
    """All nodes below one."""
    for child in node.children:
        yield ShapedNode(depth, child.level, [*child.members], [*node.members])
        yield from shaped(child, depth + 1)


def tree_ops(path: Path) -> Iterator[CaseResult]:
    """The results of a case file of `gaia/tree_ops`."""
    return results(path, OperationsCase, operations)


def occupy(tree: GpuTree, at: int, cores: int, memory: int) -> GpuTree:
    """
    The tree after cores and bytes of the GPU at this position are given; from 100 cores on the whole GPU.

    Whatever is given, and be it memory alone, the GPU is no longer free. topoalign gives nothing in a tree, see
    `release_amounts`.
    """
    left = tree.gpus[at].left
    rest = Amount(cores=max(0, left.cores - cores), memory=max(0, left.memory - memory))
    return with_amount_left(tree, at, NONE_HELD if cores >= CORES else rest, tree.free - {at})


def with_amount_left(tree: GpuTree, at: int, left: Amount, free: frozenset[int]) -> GpuTree:
    """The tree with another amount left of one GPU."""
    offered = tree.gpus[at].offered
    held = Amount(cores=offered.cores - left.cores, memory=offered.memory - left.memory)
    changed = msgspec.structs.replace(tree.gpus[at], held=held, usable=True)
    return GpuTree(tree.root, (*tree.gpus[:at], changed, *tree.gpus[at + 1 :]), free)


def release_amounts(tree: GpuTree, at: int, cores: int, memory: int) -> GpuTree:
    """
    The tree after cores and bytes of the GPU at this position are given back; from 100 cores on the whole GPU.

    A GPU that has all its cores again is free, even if not all its memory is back. The original resets such a GPU first,
    which is no part of the decision. topoalign gives nothing back in a tree: each decision makes its own of what is held by
    then, and there a GPU of which memory alone is held is not free.
    """
    offered = tree.gpus[at].offered
    left = tree.gpus[at].left
    if cores >= CORES:
        left = offered
    else:
        left = Amount(cores=min(offered.cores, left.cores + cores), memory=min(offered.memory, left.memory + memory))
    return with_amount_left(tree, at, left, tree.free | {at} if left.cores == offered.cores else tree.free)


def operations(case: OperationsCase) -> Outcome:
    """What the tree has left after each operation. One on a minor that no card has changes nothing."""
    tree = empty_tree(case.topology)
    got = []
    positions = {minor: at for at, minor in enumerate(case.topology.minors)}
    for each in case.ops:
        if each.minor in positions:
            change = occupy if each.op == "occupy" else release_amounts
            tree = change(tree, positions[each.minor], each.cores, each.memory_blocks * MEMORY_BLOCK)
        got.append(state_of(tree))
    return case.expect_after_each_op, got


def state_of(tree: GpuTree) -> TreeState:
    """What the cards have left."""
    return TreeState(
        cores=[card.left.cores for card in tree.gpus],
        memory_bytes=[card.left.memory for card in tree.gpus],
        available=tree.available(tree.root),
        available_minors=[card.minor for card in tree.leaves(tree.root)],
    )


def empty_tree(machine: Machine) -> GpuTree:
    """The tree of a machine of which nothing is held."""
    cards = [
        SharedGpu(
            device=DeviceID(f"GPU-{minor}"),
            index=index,
            minor=minor,
            offered=Amount(cores=CORES, memory=memory),
        )
        for index, (minor, memory) in enumerate(zip(machine.minors, machine.total_memory_bytes, strict=True))
    ]
    return build_free_tree(build_pcie_tree(machine.levels, machine.multi_gpu_board), cards)


SUITES: dict[str, Suite] = {
    **gaia_admission.SUITES,
    "gaia/evaluators": evaluators_suite,
    "gaia/tree_ops": tree_ops,
    "gaia/tree_shape": tree_shape,
}
