"""The evaluators of the GPU tree against references that know only sets of GPUs, and accept every tied answer."""

import pytest
from hami_support import BLOCK, LEVELS, Levels, hierarchies, shared_gpu
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.holdings import Amount
from topoalign.core.sharing.gaia import evaluators
from topoalign.core.sharing.gaia.evaluators import GaiaRefusal
from topoalign.core.sharing.gaia.pcie_tree import GpuTree, build_free_tree, build_pcie_tree
from topoalign.core.sharing.shared_gpus import SharedGpu


@st.composite
def card_lists(draw: st.DrawFn, count: int) -> list[SharedGpu]:
    """Cards of which something may be held, with shuffled minors."""
    minors = draw(st.permutations(range(count)))
    return [draw(cards(index, minor)) for index, minor in enumerate(minors)]


@st.composite
def cards(draw: st.DrawFn, index: int, minor: int) -> SharedGpu:
    """A card with few different amounts, so that many cards are equal."""
    cores, memory = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 1), (30, 1), (30, 2), (80, 3), (100, 4)]))
    return shared_gpu(
        index,
        4 * BLOCK + draw(st.sampled_from([0, 1])),
        cores,
        memory * BLOCK,
        minor=minor,
        usable=draw(st.integers(0, 9)) > 0 and (cores < 100 or draw(st.booleans())),
        processes=draw(st.integers(0, 1)),
    )


Cards = tuple[SharedGpu, ...]
Answer = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Levels, GpuTree]:
    levels = draw(hierarchies())
    return levels, build_free_tree(build_pcie_tree(levels, [0] * len(levels)), draw(card_lists(len(levels))))


def nodes_of(levels: Levels) -> list[tuple[int, frozenset[int]]]:
    """Level and GPUs of the inner nodes below the root: the neighbours of a GPU up to a level that one of them has."""
    found = set()
    for card, row in enumerate(levels):
        for level in LEVELS:
            if level in row:
                found.add((level, frozenset(b for b, other in enumerate(row) if b == card or 0 < other <= level)))
    return sorted(found, key=lambda node: (node[0], sorted(node[1])))


def is_free(card: SharedGpu) -> bool:
    return card.usable and card.held.cores == card.held.memory == 0


def free(cards: Cards, members: frozenset[int]) -> int:
    return sum(is_free(cards[member]) for member in members)


def processes(cards: Cards, members: frozenset[int]) -> int:
    return sum(cards[member].processes for member in members)


def first(cards: Cards, members: frozenset[int], count: int) -> Answer:
    indexes = [member for member in sorted(members) if is_free(cards[member])]
    return tuple(indexes[:count]) if len(indexes) >= count else ()


def all_fragments(levels: Levels, cards: Cards, count: int) -> set[Answer]:
    """All answers of `fragment`: each of the smallest nodes below is entered."""
    nodes = nodes_of(levels)

    def enter(members: frozenset[int], below: int) -> set[Answer]:
        inside = [node for node in nodes if node[1] <= members and node[0] < below]
        nearest = [n for n in inside if not any(n[0] < other[0] and n[1] <= other[1] for other in inside)]
        enough = [node for node in nearest if free(cards, node[1]) >= count]
        if not enough:
            return {first(cards, members, count)}
        keys = {node: (free(cards, node[1]), processes(cards, node[1])) for node in enough}
        best = [node for node in enough if keys[node] == min(keys.values())]
        return {answer for level, members in best for answer in enter(members, level)}

    return enter(frozenset(range(len(cards))), 60)


def all_links(levels: Levels, cards: Cards, count: int) -> set[Answer]:
    """All answers of `link` for two GPUs or more: of the nodes that are the lowest with enough for one of their GPUs."""
    nodes = nodes_of(levels)
    lowest = set()
    for card in range(len(cards)):
        around = [node for node in nodes if card in node[1] and free(cards, node[1]) >= count]
        lowest |= {min(around)} if around else set()
    if not lowest:
        return {first(cards, frozenset(range(len(cards))), count)}
    keys = {node: (node[0], free(cards, node[1]), processes(cards, node[1])) for node in lowest}
    return {first(cards, node[1], count) for node in lowest if keys[node] == min(keys.values())}


def indexes(chosen: Cards) -> Answer:
    return tuple(card.index for card in chosen)


@given(trees(), st.integers(1, 6))
def test_fragment_gives_one_of_the_tied_answers(machine: tuple[Levels, GpuTree], count: int) -> None:
    levels, tree = machine

    assert indexes(evaluators.fragment(tree, count)) in all_fragments(levels, tree.gpus, count)


@given(trees(), st.integers(2, 6))
def test_link_gives_one_of_the_tied_answers(machine: tuple[Levels, GpuTree], count: int) -> None:
    levels, tree = machine

    assert indexes(evaluators.choose_linked_gpus(tree, count)) in all_links(levels, tree.gpus, count)


@given(trees(), st.integers(1, 100), st.integers(1, 4 * BLOCK))
def test_share_gives_the_first_in_order_that_has_enough(
    machine: tuple[Levels, GpuTree], cores: int, memory: int
) -> None:
    _, tree = machine
    order = sorted(tree.gpus, key=lambda c: (c.left.cores, c.left.memory // BLOCK, c.processes, c.minor))
    enough = [card for card in order if card.left.cores >= cores and card.left.memory >= memory]

    assert tuple(enough[:1]) == evaluators.share(tree, cores, memory)


@given(trees())
def test_link_asked_for_one_card_may_give_one_in_use(machine: tuple[Levels, GpuTree]) -> None:
    """An oddity of the original that `evaluate` never meets: a GPU is not asked whether it is in use."""
    _, tree = machine
    order = sorted(tree.gpus, key=lambda c: (c.left.memory // BLOCK, c.processes, c.minor))

    assert (order[0],) == evaluators.choose_linked_gpus(tree, 1)


def two_pairs(*, busy: int | None = None, minors: tuple[int, ...] = (0, 1, 2, 3)) -> GpuTree:
    levels = [[0 if a == b else 10 if a // 2 == b // 2 else 50 for b in range(4)] for a in range(4)]
    cards = [shared_gpu(i, 4 * BLOCK, 10 if i == busy else 0, minor=minor) for i, minor in enumerate(minors)]
    return build_free_tree(build_pcie_tree(levels, [0] * 4), cards)


def chosen(tree: GpuTree, cores: int, memory: int = BLOCK) -> list[int]:
    found = evaluators.evaluate(tree, Amount(cores=cores, memory=memory))
    assert not isinstance(found, GaiaRefusal), found
    return [card.minor for card in found]


def test_equal_nodes_go_by_the_lowest_minor_below_them() -> None:
    """Where the original answers by chance, and not by the lowest index."""
    assert [3, 0] == chosen(two_pairs(minors=(2, 1, 3, 0)), 200)
    assert [3] == chosen(two_pairs(minors=(2, 1, 3, 0)), 100)


def test_a_lower_level_counts_more_than_fewer_free_cards() -> None:
    """GPUs 2 and 3 behind several switches are just two; the three behind one switch are nearer to one another."""
    three, two = {0, 1, 4}, {2, 3}
    levels = [[10 if {a, b} <= three else 20 if {a, b} <= two else 50 for b in range(5)] for a in range(5)]
    cards = [shared_gpu(i, BLOCK, minor=9 - i) for i in range(5)]

    assert [9, 8] == chosen(build_free_tree(build_pcie_tree(levels, [0] * 5), cards), 200)


def test_one_card_is_taken_beside_a_card_in_use() -> None:
    assert [3] == chosen(two_pairs(busy=2), 100)
    assert [0, 1] == chosen(two_pairs(busy=2), 200)
    assert [0, 1, 3] == chosen(two_pairs(busy=2), 300)
    assert [2] == chosen(two_pairs(busy=2), 20)


def test_memory_of_whole_cards_is_not_looked_at() -> None:
    """An oddity of the original: a GPU of 4 blocks is given to who asks for 100."""
    assert [0] == chosen(two_pairs(), 100, 100 * BLOCK)


@pytest.mark.parametrize(
    ("cores", "memory", "reason"),
    [
        (0, 0, GaiaRefusal.NOTHING_ASKED),
        (150, 1, GaiaRefusal.NOT_WHOLE_GPUS),
        (20, 0, GaiaRefusal.AMOUNT_MISSING),
        (0, 1, GaiaRefusal.AMOUNT_MISSING),
        (20, 4 * BLOCK + 1, GaiaRefusal.MEMORY_ABOVE_GPU),
        (500, 0, GaiaRefusal.NO_FREE_GPU),
    ],
)
def test_what_cannot_be_given_is_refused(cores: int, memory: int, reason: GaiaRefusal) -> None:
    assert reason is evaluators.evaluate(two_pairs(), Amount(cores=cores, memory=memory))


def test_memory_is_compared_with_the_first_card_after_all_cards() -> None:
    """An oddity of the original: a larger GPU may be given, and a smaller first GPU is what a refusal names."""
    tree = two_pairs()
    large = build_free_tree(tree.root, [*tree.gpus[:3], shared_gpu(3, 9 * BLOCK)])

    assert [3] == chosen(large, 20, 9 * BLOCK)
    assert GaiaRefusal.MEMORY_ABOVE_GPU is evaluators.evaluate(large, Amount(cores=20, memory=10 * BLOCK))


@pytest.mark.parametrize("cores", [20, 100, 200])
def test_a_machine_without_cards_has_none_to_give(cores: int) -> None:
    """The original does not start there."""
    tree = build_free_tree(build_pcie_tree([], []), [])

    assert GaiaRefusal.NO_FREE_GPU is evaluators.evaluate(tree, Amount(cores=cores, memory=BLOCK))
