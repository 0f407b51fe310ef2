"""The tree of GPUs against clusters found by reachability, and its marks against sets that are kept for each node."""

from collections import Counter
from itertools import combinations

from hami_support import BLOCK, LEVELS, Levels, hierarchies, shared_gpu
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.sharing.gaia.pcie_tree import (
    GaiaTreeNode,
    GpuTree,
    build_free_tree,
    build_pcie_tree,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.tools.conformance.gaia import occupy, release_amounts


@st.composite
def odd_levels(draw: st.DrawFn, most: int = 7) -> Levels:
    """Levels that make no tree, some of them unknown to NVML."""
    count = draw(st.integers(0, most))
    levels = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        levels[a][b] = levels[b][a] = draw(st.sampled_from([0, 15, 60, -1, *LEVELS]))
    return levels


Cluster = tuple[int, frozenset[int]]


def clusters(levels: Levels) -> set[Cluster]:
    """Level and cards of each inner node: those that reach one another by at most this level, if a pair has just it."""
    found = set()
    for level in LEVELS:
        for card in range(len(levels)):
            reached = {card}
            while (
                more := {b for a in reached for b in range(len(levels)) if b != a and levels[a][b] <= level} - reached
            ):
                reached |= more
            if any(levels[a][b] == level for a, b in combinations(reached, 2)):
                found.add((level, frozenset(reached)))
    return found


def parent(node: Cluster, nodes: set[Cluster]) -> frozenset[int]:
    """The cards of the next node upwards; all cards if that is the root."""
    level, members = node
    above = [other for other in nodes if other[0] > level and members <= other[1]]
    return min(above)[1] if above else frozenset()


def pairs(node: GaiaTreeNode, root: GaiaTreeNode) -> list[tuple[Cluster, frozenset[int]]]:
    """Each node below one, with the cards of its parent, which are () for the root."""
    found = []
    for child in node.children:
        found.append(((child.level, frozenset(child.members)), frozenset(node.members if node is not root else ())))
        found += pairs(child, root)
    return found


@given(hierarchies())
def test_nodes_are_the_clusters_of_each_level(levels: Levels) -> None:
    root = build_pcie_tree(levels, [0] * len(levels))
    nodes = clusters(levels) | {(0, frozenset([card])) for card in range(len(levels))}

    assert sorted(range(len(levels))) == [*root.members]
    assert Counter((node, parent(node, nodes)) for node in nodes) == Counter(pairs(root, root))


@given(hierarchies())
def test_cards_of_one_board_are_as_near_as_at_one_switch(levels: Levels) -> None:
    boards = [[0 if level == 10 else level for level in row] for row in levels]

    assert build_pcie_tree(levels, [0] * len(levels)) == build_pcie_tree(boards, [1] * len(levels))


@given(odd_levels(), st.integers(0, 1))
def test_each_card_is_below_the_root_once_whatever_the_levels(levels: Levels, board: int) -> None:
    """Levels that make no tree, and such as NVML does not know, lose no card and count none twice."""
    root = build_pcie_tree(levels, [board] * len(levels))
    leaves = [card for (level, members), _ in pairs(root, root) if level == 0 for card in members]

    assert [*range(len(levels))] == sorted(leaves)
    assert [*range(len(levels))] == [*root.members]


def test_cards_at_level_0_without_a_board_have_no_node_in_common() -> None:
    """The original ends with an error there; here each hangs below the root."""
    assert [(0,), (1,)] == [child.members for child in build_pcie_tree([[0, 0], [0, 0]], [0, 1]).children]


def test_a_card_with_all_cores_is_free_though_memory_is_missing() -> None:
    """An oddity of the original; a use of memory alone takes a card out all the same."""
    tree = occupy(build_free_tree(build_pcie_tree([[0]], [0]), [card(0)]), 0, 50, 8 * BLOCK)
    back = release_amounts(tree, 0, 50, BLOCK)

    assert [(0, 50), (1, 100)] == [(each.available(each.root), each.gpus[0].left.cores) for each in (tree, back)]
    assert BLOCK == back.gpus[0].left.memory
    assert 0 == occupy(back, 0, 0, 1).available(back.root)


def test_there_may_be_more_than_32_cards() -> None:
    levels = [[0 if a == b else 10 if a // 2 == b // 2 else 50 for b in range(40)] for a in range(40)]
    root = build_pcie_tree(levels, [0] * 40)
    tree = occupy(build_free_tree(root, [card(index) for index in range(40)]), 39, 1, 1)

    assert 39 == tree.available(tree.root)
    assert [(38,), (39,)] == [leaf.members for leaf in root.children[0].children[-1].children]


def card(index: int, memory: int = 8 * BLOCK) -> SharedGpu:
    return shared_gpu(index, memory, minor=index + 3)


def available(tree: GpuTree) -> dict[frozenset[int], int]:
    """The free cards of each inner node, by its cards."""
    found, open_nodes = {}, [tree.root]
    while open_nodes:
        node = open_nodes.pop()
        if node.children:
            found[frozenset(node.members)] = tree.available(node)
            open_nodes += node.children
    return found


operations = st.tuples(
    st.booleans(), st.integers(0, 3), st.sampled_from([0, 5, 50, 99, 100, 300]), st.integers(0, 9).map(BLOCK.__mul__)
)


@given(hierarchies(most=4), st.lists(operations, max_size=12))
def test_marks_are_those_of_sets_kept_for_each_node(levels: Levels, ops: list[tuple[bool, int, int, int]]) -> None:
    """Any use takes a card out of all nodes above it; having all 100 cores again puts it back, whatever its memory."""
    count = len(levels)
    tree = build_free_tree(build_pcie_tree(levels, [0] * count), [card(index) for index in range(count)])
    free = {members: {*members} for members in available(tree)}
    cores, memory = [100] * count, [8 * BLOCK] * count
    for taken, card_at, amount, size in ops:
        at = card_at % count
        tree = (occupy if taken else release_amounts)(tree, at, amount, size)
        sign = -1 if taken else 1
        cores[at] = (0 if taken else 100) if amount >= 100 else min(100, max(0, cores[at] + sign * amount))
        memory[at] = (0 if taken else 8) * BLOCK if amount >= 100 else min(8 * BLOCK, max(0, memory[at] + sign * size))
        for members, left in free.items():
            if at in members and taken:
                left.discard(at)
            elif at in members and cores[at] == 100:
                left.add(at)

        assert cores == [each.left.cores for each in tree.gpus]
        assert memory == [each.left.memory for each in tree.gpus]
        assert {members: len(left) for members, left in free.items()} == available(tree)


def test_what_is_held_already_is_not_free() -> None:
    """The tree of a node with allocations: a card with a share, a whole holder or a fault is not given whole."""
    held = [
        card(0),
        shared_gpu(1, 8, memory_held=1),
        shared_gpu(2, 8, usable=False),
        shared_gpu(3, 8, usable=False),
    ]
    tree = build_free_tree(build_pcie_tree([[50] * 4] * 4, [0] * 4), held)

    assert [held[0]] == tree.leaves(tree.root)
    assert 2 == release_amounts(tree, 2, 100, 8).available(tree.root)
