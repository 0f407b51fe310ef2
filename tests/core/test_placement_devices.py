"""Which devices are handed out, and when the device plugin has a say."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import OfferedDevices
from topoalign.core.placement.device_choice import DeviceChoice, choose_devices, likely_takeover, split_by_affinity
from topoalign.core.placement.gpus.bandwidth import SetScorer
from topoalign.core.placement.gpus.device_policy import GpuChoice, Simple

A, B, C, D, X = (DeviceID(name) for name in "abcdx")
DEVICES = OfferedDevices({A: (0,), B: (0,), C: (1,), D: (1,), X: None})
GPU = ResourceName("nvidia.com/gpu")


def run(
    required: int,
    affinity: int | None,
    answer: tuple[DeviceID, ...] = (),
    allocated: tuple[DeviceID, ...] = (),
    reusable: tuple[DeviceID, ...] = (),
) -> tuple[DeviceChoice | None, tuple[DeviceID, ...]]:
    """What the plugin was asked, and what came out."""
    choice = choose_devices(GPU, DEVICES, [*DEVICES], allocated, reusable, required, affinity)
    return choice._replace(fallback=()) if choice.is_open else None, choice.complete(answer)


def test_the_plugin_is_asked_only_where_there_is_a_choice() -> None:
    assert (DeviceChoice(DEVICES.some((A, B)), (), 1), (B,)) == run(1, 0b01, answer=(B,))
    assert (None, (A, B)) == run(2, 0b01, answer=(C, D)), "all that are aligned are needed"
    assert (DeviceChoice(DEVICES.everything, (A, B), 3), (A, B, D)) == run(3, 0b01, answer=(A, B, D))
    assert (DeviceChoice(DEVICES.everything, (), 5), (A, B, C, D, X)) == run(5, None), (
        "without affinity it is asked even for all"
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param((), (A,), id="no preference"),
        pytest.param((A, B), (A,), id="too many"),
        pytest.param((C,), (A,), id="not aligned"),
        pytest.param((DeviceID("zzz"),), (A,), id="unknown"),
    ],
)
def test_an_odd_answer_is_cut_or_filled_up(answer: tuple[DeviceID, ...], expected: tuple[DeviceID, ...]) -> None:
    assert expected == run(1, 0b01, answer=answer)[1]


def test_what_init_containers_left_comes_first_whatever_its_node() -> None:
    assert (None, (C,)) == run(1, 0b01, allocated=(C,), reusable=(C,))
    assert (DeviceChoice(DEVICES.some((A, B, C)), (C,), 2), (B, C)) == run(
        2, 0b01, answer=(B, C), allocated=(C,), reusable=(C,)
    )


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7), st.data())
def test_the_most_likely_of_all_random_takeovers_is_assumed(nodes: list[int], data: st.DataObject) -> None:
    """All sets of devices are equally likely, so the distribution over NUMA nodes that most of them have is."""
    amount = data.draw(st.integers(1, len(nodes) - 1))
    devices = OfferedDevices({DeviceID(f"d{place}"): (node,) for place, node in enumerate(nodes)})
    ways = Counter(tuple(sorted(some)) for some in combinations(nodes, amount))

    likely = likely_takeover(devices, [*devices], amount)

    assert max(ways.values()) == ways[tuple(sorted(nodes[devices.places[device]] for device in likely))]


@given(st.sets(st.sampled_from([*DEVICES])), st.sampled_from([None, 0b01, 0b10, 0b11]))
def test_sides_split_what_is_available(available: set[DeviceID], affinity: int | None) -> None:
    split = split_by_affinity(DEVICES, available, affinity)

    assert sorted(available) == sorted(device for side in split for device in side)
    assert all(any(affinity and affinity >> node & 1 for node in DEVICES[device] or ()) for device in split.aligned)


class Compared(str):
    """Counts how often such names are compared with one another; sets and dicts compare their hashes first."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_thousands_of_devices_are_not_compared_with_one_another() -> None:
    """Whatever is passed: the aligned devices, the healthy ones, those in use and those of init containers are looked up."""
    names = [DeviceID(Compared(f"d{i}")) for i in range(400)]
    devices = OfferedDevices({name: (i % 2,) for i, name in enumerate(names)})
    Compared.times = 0

    asked = choose_devices(GPU, devices, names, names[:50], names[:20], 240, 0b01)

    assert (370, 195) == (len(asked.available), len(asked.must_include))
    assert Compared.times < len(names)


class NotSearched(list[int]):
    def __contains__(self, position: object) -> bool:
        raise AssertionError("searched from one end to the other")


def test_simple_looks_up_what_must_be_in_the_set() -> None:
    assert (0, 1, 2, 7, 9) == Simple().choose(GpuChoice(SetScorer([]), range(10), NotSearched([9, 7]), 5))
