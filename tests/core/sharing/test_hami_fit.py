"""Which cards a container gets, against a reference written from HAMi's rules, and its reasons one by one."""

from typing import Any

import hami_reference as reference
import msgspec
import pytest
from hami_support import A100, UUIDS, annotations, cards, pair_scores, requests, usage
from hami_support import request as asking
from hypothesis import example, given
from hypothesis import strategies as st

from topoalign.core.demand.share_annotations import read_as_hami
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.sharing.hami.fit import Surroundings, Unfit, fit


@given(
    cards(),
    requests,
    annotations,
    st.sets(st.sampled_from(UUIDS), max_size=1),
    pair_scores,
)
@example([reference.Card("a"), reference.Card("b", numa=1)], asking(), {}, {"b"}, {})
def test_fit_takes_what_the_rules_take(
    some: list[reference.Card],
    request: HamiRequest,
    notes: dict[str, str],
    cordoned: set[str],
    scores: dict[str, dict[str, int]],
) -> None:
    """Cards in any order, in all modes, with every annotation; the same cards in the same order, or the same reasons."""
    node = reference.Node(some, cordoned, scores)

    expected = reference.fit(some, request, notes, "spread", node)

    around = Surroundings(rules=read_as_hami(notes), cordoned=frozenset(cordoned), scores=scores)
    assert expected == answer([usage(card) for card in reversed(some)], request, around)


def answer(walk: list[Any], request: HamiRequest, around: Surroundings) -> reference.Answer:
    found = fit(walk, request, around)
    if isinstance(found, Unfit):
        return False, [], found.reason
    return True, [(share.uuid, share.memory, share.cores) for share in found], ""


REASONS = [
    ("CardNotHealth", {"healthy": False}, {}, {}),
    ("CardCordoned", {"uuid": "cordoned"}, {}, {}),
    ("CardTypeMismatch", {}, {}, {"nvidia.com/use-gputype": "V100"}),
    ("CardTypeMismatch", {"mode": "mps"}, {}, {"nvidia.com/vgpu-mode": "hami-core"}),
    ("CardTypeMismatch", {}, {"vendor": "Ascend"}, {}),
    ("CardUuidMismatch", {}, {}, {"nvidia.com/nouse-gpuuuid": "a"}),
    ("CardTimeSlicingExhausted", {"used_slots": 4}, {}, {}),
    ("ExclusiveDeviceAllocateConflict", {"used_slots": 1}, {}, {"hami.io/gpu-scheduler-policy": "spread,mutex"}),
    ("CardInsufficientMemory", {"used_memory": 900}, {"memory": 200}, {}),
    ("CardInsufficientCore", {"used_cores": 80}, {"cores": 30}, {}),
    ("CardInsufficientCore", {"cores": 4}, {"cores": 200}, {}),
    ("ExclusiveDeviceAllocateConflict", {"used_slots": 1}, {"cores": 100}, {}),
    ("CardComputeUnitsExhausted", {"used_cores": 100}, {}, {}),
    ("CardMigTopologyInfeasible", {"mode": "mig"}, {}, {}),
]


@pytest.mark.parametrize(("reason", "card", "request_", "notes"), REASONS)
def test_each_check_has_its_reason(
    reason: str, card: dict[str, Any], request_: dict[str, Any], notes: dict[str, str]
) -> None:
    around = Surroundings(rules=read_as_hami(notes), cordoned=frozenset({"cordoned"}))
    walk = [usage(reference.Card(**{"uuid": "a", **card}))]

    assert (False, [], f"1/1 {reason}") == answer(walk, asking(**request_), around)


def test_checks_come_in_their_order() -> None:
    """A card that fails all of them is refused for the first; repaired one by one, for the next."""
    faults: dict[str, Any] = {
        "uuid": "cordoned",
        "healthy": False,
        "used_slots": 4,
        "used_memory": 900,
        "used_cores": 100,
    }
    notes = {"nvidia.com/use-gputype": "V100", "nvidia.com/nouse-gpuuuid": "cordoned"}
    repairs: list[tuple[dict[str, Any], list[str]]] = [
        ({"healthy": True}, []),
        ({"uuid": "a"}, []),
        ({}, ["nvidia.com/use-gputype"]),
        ({}, ["nvidia.com/nouse-gpuuuid"]),
        ({"slots": 8}, []),
        ({"used_memory": 0}, []),
    ]
    request = asking(memory=200, cores=50)
    reasons = []
    for changes, dropped in [({}, []), *repairs]:
        faults |= changes
        notes = {key: text for key, text in notes.items() if key not in dropped}
        if "cordoned" not in faults["uuid"] and "nvidia.com/nouse-gpuuuid" in notes:
            notes["nvidia.com/nouse-gpuuuid"] = "a"
        walk = [usage(reference.Card(**faults))]
        reasons.append(
            answer(walk, request, Surroundings(rules=read_as_hami(notes), cordoned=frozenset({"cordoned"})))[2].split()[
                1
            ]
        )

    assert [
        "CardNotHealth",
        "CardCordoned",
        "CardTypeMismatch",
        "CardUuidMismatch",
        "CardTimeSlicingExhausted",
        "CardInsufficientMemory",
        "CardInsufficientCore",
    ] == reasons


def test_a_whole_card_is_one_only_where_cores_are_not_scaled() -> None:
    """A card of 200 cores takes a second container that asks for 100, as upstream has it."""
    scaled = usage(reference.Card("a", cores=200, used_cores=100, used_slots=1))

    assert answer([scaled], asking(cores=100), Surroundings())[0]


def test_one_container_can_have_several_instances_of_a_card() -> None:
    three = msgspec.structs.replace(A100[0], placements=A100[0].placements[:3])
    card = usage(reference.Card("a", mode="mig", profiles=(three,)))

    assert [("a", 100, 0)] * 3 == answer([card], asking(count=3, memory=100), Surroundings())[1]
    assert (
        "1/1 CardMigTopologyInfeasible, 3/1 AllocatedCardsInsufficientRequest"
        == answer([card], asking(count=4, memory=100), Surroundings())[2]
    )


def test_who_asks_for_no_card_gets_none() -> None:
    assert () == fit([], asking(count=0), Surroundings())


def numa(uuid: str, node: int) -> Any:
    return usage(reference.Card(uuid, numa=node))


def test_cards_of_another_numa_node_begin_the_walk_again() -> None:
    """
    Two cards of node 0 are thrown away where a card of node 1 comes between; with `topology-aware` that has no reason.

    A card that the pod does not want otherwise, as by its uuid, still begins the walk again; one of a wrong type does not.
    """
    bind = {"nvidia.com/numa-bind": "true"}
    topology = {**bind, "hami.io/gpu-scheduler-policy": "topology-aware"}
    other_uuid = {**bind, "nvidia.com/nouse-gpuuuid": "c"}
    walk = [numa("a", 0), numa("b", 0), numa("c", 1), numa("d", 0)]
    foreign = [*walk[:2], usage(reference.Card("c", numa=1, type="Ascend")), walk[3]]
    three = asking(count=3)

    def found(walk: list[Any], notes: dict[str, str]) -> reference.Answer:
        return answer(walk, three, Surroundings(rules=read_as_hami(notes)))

    assert (False, [], "1/4 AllocatedCardsInsufficientRequest, 3/4 NumaNotFit") == found(walk, bind)
    assert (False, [], "1/4 AllocatedCardsInsufficientRequest") == found(walk, topology)
    assert (False, [], "1/4 AllocatedCardsInsufficientRequest, 1/4 CardUuidMismatch, 2/4 NumaNotFit") == found(
        walk, other_uuid
    )
    assert ["a", "b", "d"] == [uuid for uuid, _, _ in found(foreign, {**bind, "nvidia.com/use-gputype": "nvidia"})[1]]


def test_as_many_cards_as_are_asked_for_are_enough() -> None:
    for policy in ("spread", "topology-aware"):
        around = Surroundings(rules=read_as_hami({}, policy))
        walk = [usage(reference.Card(uuid)) for uuid in "ab"]

        assert (True, [("a", 0, 0), ("b", 0, 0)], "") == answer(walk, asking(count=2), around)


def test_a_card_without_cores_takes_who_asks_for_none() -> None:
    assert answer([usage(reference.Card("a", cores=0))], asking(), Surroundings())[0]
