"""Where a pod of several containers goes, against a reference written from HAMi's rules."""

import hami_reference as reference
import pytest
from hami_support import UUIDS, annotations, cards, pair_scores, requests, usage
from hami_support import request as asking
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.share_annotations import GpuRules, Weights, read_as_hami
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.scorers import hami_order
from topoalign.core.sharing.hami.fit import Unfit
from topoalign.tools.conformance.hami_place import NodeGpus, PodShares, place_pod_as_hami

containers = st.lists(st.lists(requests, max_size=1), min_size=1, max_size=4)


@given(
    cards(),
    containers,
    st.integers(0, 2),
    annotations,
    pair_scores,
    st.sets(st.sampled_from(UUIDS), max_size=1),
)
def test_a_pod_is_placed_container_by_container(
    some: list[reference.Card],
    wanted: list[list[HamiRequest]],
    init: int,
    notes: dict[str, str],
    scores: dict[str, dict[str, int]],
    cordoned: set[str],
) -> None:
    node = reference.Node(some, cordoned, scores)
    expected = reference.place(node, wanted, init, notes)

    found = place_pod_as_hami(
        NodeGpus(cards=tuple(usage(card) for card in some), scores=scores, cordoned=frozenset(cordoned)),
        PodShares(
            containers=tuple(map(tuple, wanted)),
            init_containers=init,
            rules=read_as_hami(notes),
        ),
    )

    if isinstance(expected, str):
        assert Unfit(expected) == found
        return
    assert not isinstance(found, Unfit)
    assert expected[0] == [[(share.uuid, share.memory, share.cores) for share in shares] for shares in found.containers]
    assert float(reference.node_score(some)) == pytest.approx(found.score, rel=1e-6)


def spec_nodes() -> dict[str, NodeGpus]:
    """Two nodes of two cards of 8000 MiB; of device1 and device4 something is used."""
    cards = [
        reference.Card("device1", index=0, slots=10, memory=8000, used_slots=1, used_memory=2000, used_cores=25),
        reference.Card("device2", index=1, slots=10, memory=8000),
        reference.Card("device3", index=0, slots=10, memory=8000),
        reference.Card("device4", index=1, slots=10, memory=8000, used_slots=1, used_memory=6000, used_cores=75),
    ]
    return {
        "node1": NodeGpus(cards=tuple(usage(each) for each in cards[:2])),
        "node2": NodeGpus(cards=tuple(usage(each) for each in cards[2:])),
    }


@pytest.mark.parametrize(
    ("of_node", "of_cards", "node", "card"),
    [
        ("binpack", "binpack", "node2", "device4"),
        ("binpack", "spread", "node2", "device3"),
        ("spread", "binpack", "node1", "device1"),
        ("spread", "spread", "node1", "device2"),
    ],
)
def test_policies_of_nodes_and_of_cards_go_together(of_node: str, of_cards: str, node: str, card: str) -> None:
    pod = PodShares(containers=((asking(memory=1000, cores=20),),), rules=GpuRules(hami=of_cards))
    found = {NodeName(name): place_pod_as_hami(each, pod) for name, each in spec_nodes().items()}
    scores = {name: each.score for name, each in found.items() if not isinstance(each, Unfit)}

    assert {"node1": 3.0, "node2": 8.0} == {name: round(score, 4) for name, score in scores.items()}
    chosen = min(scores, key=lambda name: hami_order(of_node, scores[name]))
    placed = found[chosen]
    assert not isinstance(placed, Unfit)
    assert (node, card) == (chosen, placed.containers[0][0].uuid)


def test_an_init_container_takes_another_card_where_it_needs_more() -> None:
    """Of the fuller card 2000 MiB are left: 5000 of the init container and 4000 of the other are on the emptier one."""
    containers = tuple((asking(memory=memory),) for memory in (5000, 4000))
    pod = PodShares(containers=containers, init_containers=1, rules=GpuRules(hami="binpack"))

    found = place_pod_as_hami(spec_nodes()["node2"], pod)

    assert not isinstance(found, Unfit)
    assert [["device3"], ["device3"]] == [[share.uuid for share in shares] for shares in found.containers]


def test_weights_say_which_card_is_fuller() -> None:
    """Of cards with many cores used and with many slots used, weights of memory, or of cores, make either the fuller."""
    a = usage(reference.Card("a", slots=10, used_slots=1, used_cores=90, memory=100, used_memory=10))
    b = usage(reference.Card("b", slots=10, used_slots=7, used_cores=10, memory=100, used_memory=20))
    request = (asking(percent=40),)

    def taken(weights: Weights) -> str:
        pod = PodShares(containers=(request,), rules=GpuRules(hami="binpack", weights=weights))
        found = place_pod_as_hami(NodeGpus(cards=(a, b)), pod)
        assert not isinstance(found, Unfit)
        return found.containers[0][0].uuid

    assert ["a", "b", "a"] == [taken(each) for each in (Weights(), Weights(1, 1, 3), Weights(1, 3, 1))]


def test_the_request_counts_only_on_cards_named_like_their_vendor() -> None:
    """Upstream's trap: with the models of real cards the card with fewer cores left is not seen to become fuller."""
    request = (asking(cores=50),)

    def taken(model: str) -> str:
        large = usage(reference.Card("large", type=model, cores=200, used_cores=64))
        small = usage(reference.Card("small", type=model, cores=100, used_cores=25))
        found = place_pod_as_hami(NodeGpus(cards=(large, small)), PodShares(containers=(request,)))
        assert not isinstance(found, Unfit)
        return found.containers[0][0].uuid

    assert ("large", "small") == (taken("NVIDIA"), taken("NVIDIA A100"))


def test_init_containers_leave_the_cards_to_the_others() -> None:
    """Two init containers of a whole card each, one after another, and then the container: all on the only card."""
    whole = (asking(percent=100, cores=100),)
    node = NodeGpus(cards=(usage(reference.Card("a")),))

    found = place_pod_as_hami(node, PodShares(containers=(whole, whole, whole), init_containers=2))

    assert not isinstance(found, Unfit)
    assert ("a", "a", "a") == tuple(shares[0].uuid for shares in found.containers)
    assert Unfit("1/1 CardInsufficientMemory") == place_pod_as_hami(node, PodShares(containers=(whole, whole)))
