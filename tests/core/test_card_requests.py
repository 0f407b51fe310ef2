"""What a container asks for of cards in slots, against a reference written from HAMi's rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.shares import UNSET, HamiRequest, read_hami_request
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.topology.device_offers import Slots
from topoalign.tools.conformance.hami_quantities import Defaults, read_request

SLOTS = Slots()
Amounts = dict[ResourceName, int]

amounts = st.fixed_dictionaries(
    {},
    optional={
        GPU: st.integers(0, 3),
        SLOTS.memory: st.sampled_from([0, 1, 4000]),
        SLOTS.percentage: st.sampled_from([-3, 0, 1, 50, 100, 101, 1 << 32]),
        SLOTS.cores: st.sampled_from([0, 30, 100]),
    },
)
defaults = st.builds(
    Defaults,
    memory=st.sampled_from([0, 5000]),
    cores=st.sampled_from([0, 30]),
    memory_factor=st.sampled_from([0, 1, 256]),
)


def request(count: int = 1, memory: int = 0, percent: int = UNSET, cores: int = 0) -> HamiRequest:
    return HamiRequest(count=count, vendor="NVIDIA", memory=memory, percent=percent, cores=cores)


def reference(limits: Amounts, requests: Amounts, default: Defaults, card: int) -> tuple[int, int, int]:
    """From the rule: cards, MiB of each where each has so many, and cores of each."""

    def said(name: ResourceName) -> int | None:
        return limits[name] if name in limits else requests.get(name)

    if said(GPU) is None:
        return 0, 0, 0
    memory, percentage, cores = said(SLOTS.memory), said(SLOTS.percentage), said(SLOTS.cores)
    if memory:
        mib = memory * (default.memory_factor or 1)
    elif percentage is not None and percentage > 0:
        mib = card * percentage // 100 if percentage < 100 else card
    else:
        mib = default.memory or card
    return said(GPU) or 0, mib, default.cores if cores is None else cores


@given(amounts, amounts, defaults, st.integers(0, 100_000))
def test_a_request_is_read_as_the_rule_says(limits: Amounts, requests: Amounts, default: Defaults, card: int) -> None:
    found = read_request(limits, requests, default)

    assert reference(limits, requests, default, card) == (found.count, found.memory_of(card), found.cores)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, HamiRequest()),
        ({SLOTS.memory: 1000}, HamiRequest()),
        ({GPU: 0}, request(0, percent=100)),
        ({GPU: 2, SLOTS.memory: 4000}, request(2, memory=4000)),
        ({GPU: 1, SLOTS.memory: 4000, SLOTS.percentage: 150}, request(memory=4000, percent=100)),
        ({GPU: 1, SLOTS.percentage: 0, SLOTS.cores: 30}, request(percent=100, cores=30)),
    ],
)
def test_a_percentage_that_is_not_said_is_known_as_such(limits: Amounts, expected: HamiRequest) -> None:
    assert expected == read_hami_request(GPU, SLOTS, limits)


def test_names_can_be_changed() -> None:
    count, mib = ResourceName("example.com/gpu"), ResourceName("example.com/mib")
    limits = {count: 2, mib: 300, SLOTS.memory: 1, SLOTS.cores: 30}

    assert request(2, memory=300, cores=30) == read_hami_request(count, Slots(memory=mib), limits)


@pytest.mark.parametrize(
    ("wanted", "memory"),
    [(request(memory=300), 300), (request(percent=10), 102), (request(), 0), (request(memory=300, percent=10), 300)],
)
def test_memory_of_a_card(wanted: HamiRequest, memory: int) -> None:
    assert memory == wanted.memory_of(1029)
