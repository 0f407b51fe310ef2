"""Where a pod of several containers goes, against a reference written from HAMi's rules."""

import hami_reference as reference
import pytest
from hami_support import UUIDS, annotations, asked, cards, namespaces, pair_scores, quota, requests, usage
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.ids import NodeName
from topoalign.core.sharing.hami.fit import Unfit
from topoalign.core.sharing.hami.place import NodeCards, PodShares, choose_node, node_policy, place
from topoalign.core.sharing.hami.quota import effective_use
from topoalign.core.sharing.hami.selection import PodRules, read_rules
from topoalign.core.sharing.rules import Weights

containers = st.lists(st.lists(requests, max_size=1), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    cards(),
    containers,
    st.integers(0, 2),
    annotations,
    pair_scores,
    st.sets(st.sampled_from(UUIDS), max_size=1),
    namespaces,
)
def test_a_pod_is_placed_container_by_container(
    some: list[reference.Card],
    wanted: list[list[reference.Request]],
    init: int,
    notes: dict[str, str],
    scores: dict[str, dict[str, int]],
    cordoned: set[str],
    namespace: reference.Namespace | None,
) -> None:
    node = reference.Node(some, cordoned, scores)
    expected = reference.place(node, wanted, init, notes, namespace=namespace)

    found = place(
        NodeCards(cards=tuple(usage(card) for card in some), scores=scores, cordoned=frozenset(cordoned)),
        PodShares(
            containers=tuple(tuple(asked(request) for request in each) for each in wanted),
            init_containers=init,
            rules=read_rules(notes),
            quota=None if namespace is None else quota(namespace),
        ),
    )

    if isinstance(expected, str):
        assert Unfit(expected) == found
        return
    assert not isinstance(found, Unfit)
    assert expected[0] == [[(share.uuid, share.memory, share.cores) for share in shares] for shares in found.containers]
    assert float(reference.node_score(some)) == pytest.approx(found.score, rel=1e-6)


def test_weights_say_which_card_is_fuller() -> None:
    """Of cards with many cores used and with many slots used, weights of memory, or of cores, make either the fuller."""
    a = usage(reference.Card("a", slots=10, used_slots=1, used_cores=90, memory=100, used_memory=10))
    b = usage(reference.Card("b", slots=10, used_slots=7, used_cores=10, memory=100, used_memory=20))
    request = (asked(reference.Request(percent=40)),)

    def taken(weights: Weights) -> str:
        pod = PodShares(containers=(request,), rules=PodRules(policy="binpack", weights=weights))
        found = place(NodeCards(cards=(a, b)), pod)
        assert not isinstance(found, Unfit)
        return found.containers[0][0].uuid

    assert ["a", "b", "a"] == [taken(each) for each in (Weights(), Weights(1, 1, 3), Weights(1, 3, 1))]


def test_the_request_counts_only_on_cards_named_like_their_vendor() -> None:
    """Upstream's trap: with the models of real cards the card with fewer cores left is not seen to become fuller."""
    request = (asked(reference.Request(cores=50)),)

    def taken(model: str) -> str:
        large = usage(reference.Card("large", type=model, cores=200, used_cores=64))
        small = usage(reference.Card("small", type=model, cores=100, used_cores=25))
        found = place(NodeCards(cards=(large, small)), PodShares(containers=(request,)))
        assert not isinstance(found, Unfit)
        return found.containers[0][0].uuid

    assert ("large", "small") == (taken("NVIDIA"), taken("NVIDIA A100"))


def test_init_containers_leave_the_cards_to_the_others() -> None:
    """Two init containers of a whole card each, one after another, and then the container: all on the only card."""
    whole = (asked(reference.Request(percent=100, cores=100)),)
    node = NodeCards(cards=(usage(reference.Card("a")),))

    found = place(node, PodShares(containers=(whole, whole, whole), init_containers=2))

    assert not isinstance(found, Unfit)
    assert ("a", "a", "a") == tuple(shares[0].uuid for shares in found.containers)
    use = effective_use(found.containers, 2)["a"]
    assert (1, 1024, 100) == (use.slots, use.memory, use.cores)
    assert Unfit("1/1 CardInsufficientMemory") == place(node, PodShares(containers=(whole, whole)))


@pytest.mark.parametrize(
    ("policy", "scores", "chosen"),
    [
        ("binpack", {"a": 1.0, "b": 2.0}, "b"),
        ("spread", {"a": 1.0, "b": 2.0}, "a"),
        ("unknown", {"a": 1.0, "b": 2.0}, "b"),
        ("binpack", {"c": 2.0, "b": 2.0, "a": 1.0}, "b"),
        ("spread", {"c": 2.0, "b": 2.0}, "b"),
        ("binpack", {}, None),
    ],
)
def test_the_node_is_chosen_by_its_score(policy: str, scores: dict[str, float], chosen: str | None) -> None:
    assert chosen == choose_node({NodeName(name): score for name, score in scores.items()}, policy)


def test_a_pod_can_say_how_its_node_is_chosen() -> None:
    assert "spread" == node_policy({"hami.io/node-scheduler-policy": "spread"})
    assert "binpack" == node_policy({})
