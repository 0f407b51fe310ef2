"""What a container asks for in HAMi's resources, which cards its pod accepts, and how our cards become HAMi's."""

import hami_reference as reference
import pytest
from hami_support import annotations
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.demand.card_annotations import type_selection, uuid_selection
from topoalign.core.demand.hami_names import ResourceNames
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.sharing.cards import SharedCard
from topoalign.core.sharing.hami.requests import NO_DEFAULTS, UNSET, CardRequest, Defaults, plain_integer, read_request
from topoalign.core.sharing.hami.selection import PodRules, cordoned, read_rules
from topoalign.core.sharing.hami.usage import MIB, CardShare, usage_of, with_share

NOTHING = CardRequest()


def asked(amounts: dict[str, int | str], defaults: Defaults = NO_DEFAULTS) -> CardRequest:
    """The request of a container with these limits, of which `gpu`, `gpumem`, `percentage` and `gpucores` are known."""
    names = {"percentage": "nvidia.com/gpumem-percentage"}
    limits = {ResourceName(names.get(name, f"nvidia.com/{name}")): amount for name, amount in amounts.items()}
    return read_request(limits, {}, defaults)


def request(count: int = 1, memory: int = 0, percent: int = UNSET, cores: int = 0) -> CardRequest:
    return CardRequest(count=count, vendor="NVIDIA", memory=memory, percent=percent, cores=cores)


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ({}, NOTHING),
        ({"gpumem": 1000}, NOTHING),
        ({"gpu": "2"}, request(2, percent=100)),
        ({"gpu": "1.5"}, NOTHING),
        ({"gpu": 0}, request(0, percent=100)),
        ({"gpu": 1, "gpumem": "2k"}, request(memory=2000)),
        ({"gpu": 1, "gpumem": 2000, "percentage": 50}, request(memory=2000, percent=50)),
        ({"gpu": 1, "gpumem": 0, "percentage": 50}, request(percent=50)),
        ({"gpu": 1, "gpumem": 0}, request(percent=100)),
        ({"gpu": 1, "gpumem": (1 << 31) - 1}, request(memory=(1 << 31) - 1)),
        ({"gpu": 1, "gpumem": 1 << 31}, NOTHING),
        ({"gpu": 1, "gpumem": "64Gi"}, NOTHING),
        ({"gpu": 1, "gpumem": "16.0Gi"}, NOTHING),
        ({"gpu": 1, "gpumem": -1}, NOTHING),
        ({"gpu": 1, "gpumem": "-1"}, NOTHING),
        ({"gpu": 1, "percentage": -3}, request(percent=100)),
        ({"gpu": 1, "percentage": 101}, request(percent=100)),
        ({"gpu": 1, "gpumem": 10, "percentage": 150}, request(memory=10, percent=100)),
        ({"gpu": 1, "percentage": "0.5"}, request(percent=100)),
        ({"gpu": 1, "gpucores": "200"}, request(percent=100, cores=200)),
        ({"gpu": 1, "gpucores": "2.5"}, request(percent=100)),
    ],
)
def test_what_is_asked_for(amounts: dict[str, int | str], expected: CardRequest) -> None:
    assert expected == asked(amounts)


@pytest.mark.parametrize(
    ("defaults", "amounts", "expected"),
    [
        (Defaults(memory=5000, cores=30), {"gpu": 1}, request(memory=5000, cores=30)),
        (Defaults(memory=5000), {"gpu": 1, "percentage": 20}, request(percent=20)),
        (Defaults(memory=5000), {"gpu": 1, "percentage": 0}, request(memory=5000)),
        (Defaults(cores=30), {"gpu": 1, "gpucores": 0}, request(percent=100)),
        (Defaults(memory_factor=1024), {"gpu": 1, "gpumem": 4}, request(memory=4096)),
        (Defaults(memory_factor=1024), {"gpu": 1, "gpumem": 1 << 21}, NOTHING),
        (Defaults(memory_factor=1024, memory=100), {"gpu": 1}, request(memory=100)),
        (Defaults(memory_factor=0), {"gpu": 1, "gpumem": 4}, request(memory=4)),
    ],
)
def test_what_a_container_gets_that_does_not_say(
    defaults: Defaults, amounts: dict[str, int | str], expected: CardRequest
) -> None:
    assert expected == asked(amounts, defaults)


def test_a_limit_counts_before_a_request_and_names_can_be_changed() -> None:
    names = ResourceNames(count=ResourceName("example.com/gpu"))
    limits, requests = {ResourceName("example.com/gpu"): 2}, {ResourceName("example.com/gpu"): 1, names.cores: 30}

    assert request(2, percent=100, cores=30) == read_request(limits, requests, names=names)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-12", -12), ("+12", 12), ("64Gi", 64 << 30), ("2k", 2000), ("1.5k", 1500), ("1.50k", 1500),
        ("1e3", 1000), ("1E2", 100), ("1.5e1", 15), ("1E", 10**18), ("1Ei", 1 << 60), ("16.Gi", 16 << 30),
        ("16.0Gi", None), ("2.0", None), ("2000m", None), ("1.5", None), ("10e-1", None), ("1000000u", None), ("8Ei", None),
        ("x", None), ("1.0005k", None), ("", None),
    ],
)  # fmt: skip
def test_plain_integers_are_those_that_kubernetes_keeps_as_such(text: str, value: int | None) -> None:
    assert value == plain_integer(text)


@pytest.mark.parametrize(
    ("wanted", "memory"),
    [(request(memory=300), 300), (request(percent=10), 102), (request(), 0), (request(memory=300, percent=10), 300)],
)
def test_memory_of_a_card(wanted: CardRequest, memory: int) -> None:
    assert memory == wanted.memory_of(1029)


@settings(max_examples=200, deadline=None)
@given(annotations, st.sampled_from(["NVIDIA-A100", "nvidia h100", "V100", ""]), st.sampled_from("abcA"))
def test_cards_are_selected_by_type_and_uuid(notes: dict[str, str], model: str, uuid: str) -> None:
    assert reference.type_selected(notes, model) == type_selection(notes).takes_type(model)
    assert reference.uuid_selected(notes, uuid) == uuid_selection(notes).takes_uuid(uuid)


@pytest.mark.parametrize(
    ("notes", "policy", "expected"),
    [
        ({}, "spread", (False, False, False)),
        ({}, "topology-aware", (False, False, True)),
        ({"hami.io/gpu-scheduler-policy": "mutex, topology-aware"}, "spread", (False, True, True)),
        ({"hami.io/gpu-scheduler-policy": "mutex2"}, "topology-aware", (False, False, False)),
        ({"nvidia.com/numa-bind": "T"}, "spread", (True, False, False)),
        ({"nvidia.com/numa-bind": "tRUE"}, "spread", (False, False, False)),
    ],
)
def test_rules_of_a_pod(notes: dict[str, str], policy: str, expected: tuple[bool, bool, bool]) -> None:
    rules = read_rules(notes, policy)

    assert expected == (rules.numa_bind, rules.mutex, rules.topology_aware)


def test_a_mode_is_accepted_as_a_part_of_the_annotation() -> None:
    assert [True, True, False] == [PodRules(mode="hami-core,mig").takes_mode(each) for each in ("mig", "", "mps")]
    assert PodRules().takes_mode("mps")


def test_cordoned_cards_are_listed_on_their_node() -> None:
    assert frozenset({"a", "b"}) == cordoned({"hami.io/device-cordon": " a,,b ,"})
    assert frozenset() == cordoned({"hami.io/device-cordon": "  "}) == cordoned({})


def test_our_cards_in_his_amounts() -> None:
    """Rounded against whoever asks; a whole holder leaves nothing, and an unknown NUMA node is node 0."""
    card = SharedCard(
        device=DeviceID("a"),
        index=1,
        minor=3,
        memory=10 * MIB - 1,
        slots=4,
        memory_held=MIB + 1,
        slots_held=1,
        cores_held=30,
    )
    found = usage_of(card)
    whole = usage_of(SharedCard(device=DeviceID("a"), index=1, minor=3, memory=9 * MIB, slots=4, exclusive=True))

    assert (1, 0, 9, 2, 4, 1, 30) == (
        found.index, found.numa, found.memory, found.used_memory, found.slots, found.used_slots, found.used_cores,
    )  # fmt: skip
    assert (9, 4, 100) == (whole.used_memory, whole.used_slots, whole.used_cores)


def test_a_share_is_added_to_what_is_used() -> None:
    card = usage_of(SharedCard(device=DeviceID("a"), index=0, minor=0, memory=9 * MIB, slots=4))

    held = with_share(card, CardShare(uuid=card.uuid, memory=3, cores=20))

    assert (1, 3, 20, ()) == (held.used_slots, held.used_memory, held.used_cores, held.instances)
