"""What gpu-admission promises, against a reference that keeps plain numbers for each node and card."""

from hami_support import shared_gpu
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.sharing.gaia.admission import MOST_KEPT, AdmissionNode, admission_order_key, place_containers
from topoalign.tools.conformance.gaia_admission import (
    AdmissionNodeCase,
    ExpectedPromise,
    Pod,
    PromisedAmounts,
    indexes,
    promise,
)

Amounts = tuple[int, int]
"""Cores and blocks of a container."""
Described = tuple[str, int, int, list[tuple[int, int, str]]]
"""A node: name, cores, blocks, and what is promised on it already."""

amounts = st.tuples(st.sampled_from([0, 20, 50, 50, 100, 150, 200]), st.integers(0, 3))
annotations = st.sampled_from(["0", "1", "2", "0,1", "7", "-1", "", "x", "0,x", "+1"])
held = st.lists(st.tuples(st.sampled_from([0, 30, 50, 100, 200]), st.integers(0, 3), annotations), max_size=5)
described = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([0, 50, 100, 200, 350]), st.integers(0, 9), held),
    max_size=4,
    unique_by=lambda node: node[0],
)


class Card:
    """What a card of the reference has used."""

    def __init__(self, memory: int) -> None:
        self.memory, self.used_cores, self.used_memory = memory, 0, 0

    def add(self, cores: int, memory: int) -> bool:
        if self.used_cores + cores > 100 or self.used_memory + memory > self.memory:
            return False
        self.used_cores += cores
        self.used_memory += memory
        return True


def reference(nodes: list[Described], containers: list[Amounts]) -> ExpectedPromise:
    """The rules one by one: read the nodes, sort them, and take the first on which each container finds its cards."""
    total_cores, total_memory = (sum(each[i] for each in containers) for i in (0, 1))
    if total_cores == 0 or (total_cores < 100 and total_memory == 0):
        return ExpectedPromise(gpu_pod=False)
    failed, ready = {}, []
    for name, cores, blocks, placed in nodes:
        count = cores // 100
        if count == 0:
            failed[NodeName(name)] = "no GPU device"
            continue
        cards = [Card(blocks // count) for _ in range(count)]
        for asked, memory, text in placed:
            if all(part.lstrip("+-").isdigit() for part in text.split(",")):
                for index in map(int, text.split(",")):
                    if 0 <= index < count:
                        whole = asked >= 100
                        cards[index].add(100 if whole else asked, blocks // count if whole else memory)
        free_cores = 100 * count - sum(card.used_cores for card in cards)
        ready.append((free_cores, blocks - sum(card.used_memory for card in cards), name, cards))
    ready.sort(key=lambda node: node[:3])
    chosen, given_cards = None, {}
    for _, _, name, cards in ready:
        if chosen is not None:
            failed[NodeName(name)] = "already matched to another node"
        elif (found := fit(cards, containers)) is None:
            failed[NodeName(name)] = "does not match with this node"
        else:
            chosen, given_cards = NodeName(name), found
    return ExpectedPromise(
        gpu_pod=True,
        node=chosen,
        predicate_gpu_idx={position: ",".join(map(str, cards)) for position, cards in given_cards.items()},
        failed=failed,
        tried_in_order=[NodeName(name) for _, _, name, _ in ready],
    )


def fit(cards: list[Card], containers: list[Amounts]) -> dict[int, tuple[int, ...]] | None:
    found = {}
    for position, (cores, memory) in enumerate(containers):
        if cores == 0 or (cores < 100 and memory == 0):
            continue
        order = sorted(
            range(len(cards)), key=lambda i: (100 - cards[i].used_cores, cards[i].memory - cards[i].used_memory)
        )
        if cores >= 100:
            picked = [i for i in order if cards[i].used_cores == 0][: cores // 100]
            if len(picked) < cores // 100 or not all(cards[i].add(100, cards[i].memory) for i in picked):
                return None
        else:
            picked = [
                i
                for i in order
                if cards[i].used_cores + cores <= 100 and cards[i].used_memory + memory <= cards[i].memory
            ][:1]
            if not picked:
                return None
            cards[picked[0]].add(cores, memory)
        found[position] = tuple(picked)
    return found


def nodes_of(nodes: list[Described]) -> list[AdmissionNodeCase]:
    return [
        AdmissionNodeCase(NodeName(name), cores, blocks, [Pod([PromisedAmounts(*each) for each in placed])])
        for name, cores, blocks, placed in nodes
    ]


def requests(containers: list[Amounts]) -> list[Amount]:
    return [Amount(cores=cores, memory=blocks * MEMORY_BLOCK) for cores, blocks in containers]


@given(described, st.lists(amounts, min_size=1, max_size=3))
def test_node_and_cards_are_those_of_the_rules(nodes: list[Described], containers: list[Amounts]) -> None:
    assert reference(nodes, containers) == promise(nodes_of(nodes), requests(containers))


def test_memory_that_no_card_has_counts_for_the_order_of_nodes() -> None:
    """7 blocks over two cards leave one over, so node b has more left than node a, whose cards are as large."""
    nodes: list[Described] = [("b", 200, 6, []), ("a", 200, 7, [])]
    found = promise(nodes_of(nodes), requests([(20, 1)]))

    assert ["b", "a"] == found.tried_in_order


def test_a_card_with_memory_held_alone_is_taken_for_whole_and_fails() -> None:
    """An oddity of the original: nobody holds cores of the card, so it is chosen, and its memory is not there."""
    nodes: list[Described] = [("a", 200, 8, [(0, 1, "0")])]

    one = promise(nodes_of(nodes), requests([(100, 0)]))
    share = promise(nodes_of(nodes), requests([(99, 4)]))

    assert {"a": "does not match with this node"} == one.failed
    assert {0: "1"} == share.predicate_gpu_idx


def test_of_equal_cores_the_card_with_less_memory_goes_first() -> None:
    nodes: list[Described] = [("a", 300, 12, [(50, 1, "0"), (50, 2, "1"), (50, 1, "2")])]
    found = promise(nodes_of(nodes), requests([(20, 1), (20, 2)]))

    assert {0: "1", 1: "0"} == found.predicate_gpu_idx


def test_a_pod_of_halves_is_promised_a_node_without_cards() -> None:
    """An oddity of the original: the sums ask for a GPU, and no container does."""
    found = promise(nodes_of([("a", 100, 1, [])]), requests([(20, 0), (0, 5)]))

    assert ("a", {}) == (found.node, found.predicate_gpu_idx)


def test_cards_that_are_unhealthy_are_not_promised() -> None:
    ill = shared_gpu(0, MEMORY_BLOCK, usable=False)
    well = shared_gpu(1, MEMORY_BLOCK)
    found = AdmissionNode(name=NodeName("a"), gpus=(ill, well))

    assert [{0: (1,)}, {0: (1,)}] == [place_containers(found.gpus, requests([asked])) for asked in ((20, 1), (100, 0))]
    assert (True, found.load) == admission_order_key(found, requests([(200, 0)]))


@given(
    st.lists(st.tuples(st.sampled_from([0, 30, 80]), st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.lists(amounts, min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_a_node_ranks_pods_alike_however_often_they_ask(held_of: list[Amounts], pods: list[list[Amounts]]) -> None:
    """It remembers who finds room: each pod asks twice, the second time when all others have asked."""
    shared = tuple(
        shared_gpu(i, 3 * MEMORY_BLOCK, cores, held * MEMORY_BLOCK) for i, (cores, held) in enumerate(held_of)
    )
    node = AdmissionNode(name=NodeName("a"), gpus=shared)

    def fails(containers: list[Amounts]) -> bool:
        cards = [Card(3) for _ in held_of]
        assert all(card.add(*some) for card, some in zip(cards, held_of, strict=True))
        return fit(cards, containers) is None

    expected = [(fails(containers), node.load) for containers in pods * 2]

    assert expected == [admission_order_key(node, requests(containers)) for containers in pods * 2]
    assert len({tuple(each) for each in pods}) == len(node.rooms)


def test_a_node_remembers_room_for_a_limited_number_of_pods() -> None:
    card = shared_gpu(0, 64 * MEMORY_BLOCK, 50)
    node = AdmissionNode(name=NodeName("a"), gpus=(card,))
    asked = [(cores, 1) for cores in range(1, 100)]

    assert [cores > 50 for cores, _ in asked] == [admission_order_key(node, requests([each]))[0] for each in asked]
    assert 0 < len(node.rooms) <= MOST_KEPT < len(asked)


def test_an_annotation_that_is_no_list_of_numbers_counts_nothing() -> None:
    assert (0, 12, -1) == indexes("0,12,-1")
    assert () == indexes("0, 1") == indexes("") == indexes("1_0") == indexes("²")


def test_an_annotation_with_a_number_beyond_64_bits_counts_nothing() -> None:
    """The original cannot read it, and then leaves the other indexes out as well."""
    promised = [
        promise(nodes_of([("a", 200, 8, [(30, 1, text)])]), requests([(20, 1)])).predicate_gpu_idx
        for text in ("1,9223372036854775807", "1,9223372036854775808", "1,-9223372036854775809", f"1,{'9' * 5000}")
    ]

    assert [{0: "1"}, {0: "0"}, {0: "0"}, {0: "0"}] == promised
