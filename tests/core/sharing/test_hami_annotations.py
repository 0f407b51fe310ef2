"""Annotations as HAMi's parts write and read them, and what they say about a text that is none."""

from datetime import datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.go_text import go_quoted, parse_int
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.sharing.hami.node_annotations import REQUESTING, PodGpu, decode_pod, is_plugin_alive
from topoalign.core.sharing.hami.registration import (
    InvalidAnnotation,
    RegisteredGpu,
    RegisteredProfile,
    decode_old_register,
    decode_register,
)
from topoalign.tools.conformance.hami_texts import encode_pod

NOW = datetime(2026, 3, 4, 5, 6, 7)
words = st.text(st.characters(codec="ascii", exclude_characters=",:;"), min_size=1, max_size=8)
numbers = st.integers(-(1 << 31), (1 << 31) - 1)
pod_cards = st.builds(PodGpu, uuid=words, type=words, memory=numbers, cores=numbers)


def at(start: int, size: int) -> MigPlacement:
    return MigPlacement(start=start, size=size)


@given(st.lists(st.lists(pod_cards, max_size=3).map(tuple), max_size=4).map(tuple))
def test_a_pod_is_read_as_it_was_written_with_one_container_more(containers: tuple[tuple[PodGpu, ...], ...]) -> None:
    assert (*containers, ()) == decode_pod(encode_pod(containers))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,NVIDIA,1:;", "pod annotation format error, missing fields, do not use nodeName in task spec"),
        ("a,NVIDIA,x,1:;", 'invalid memory field: strconv.ParseInt: parsing "x": invalid syntax'),
        ("a,NVIDIA,1,:;", 'invalid core field: strconv.ParseInt: parsing "": invalid syntax'),
        ("a,NVIDIA,1,2147483648:;", 'invalid core field: strconv.ParseInt: parsing "2147483648": value out of range'),
    ],
)
def test_a_pod_that_cannot_be_read_has_upstreams_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidAnnotation) as raised:
        decode_pod(text)

    assert ("hami.io/vgpu-devices-allocated", reason) == (raised.value.key, raised.value.reason)


def test_what_has_no_comma_is_no_card_of_a_pod() -> None:
    assert ((), (PodGpu(uuid="a", type="NVIDIA", memory=1, cores=-2),)) == decode_pod("x:;a,NVIDIA,1,-2,more::")


registered = st.builds(
    RegisteredGpu,
    id=words,
    index=st.integers(0, 9),
    slots=numbers,
    memory=numbers,
    cores=numbers,
    type=words,
    numa=st.integers(-1, 3),
    mode=words,
    profiles=st.lists(
        st.builds(RegisteredProfile, name=words, memory=numbers, placements=st.just((at(0, 4), at(4, 4)))),
        max_size=2,
    ).map(tuple),
    healthy=st.booleans(),
)


@given(st.lists(registered, max_size=3).map(tuple))
def test_the_cards_of_a_node_are_read_as_they_were_written(cards: tuple[RegisteredGpu, ...]) -> None:
    assert cards == decode_register(msgspec.json.encode(cards).decode())


def test_what_is_zero_is_left_out_of_a_nodes_cards() -> None:
    profile = RegisteredProfile(name="1g.5gb", memory=4864, placements=(at(0, 1),))
    card = RegisteredGpu(
        id="GPU-a", slots=10, memory=8192, cores=100, type="NVIDIA P4", mode="mig", profiles=(profile,)
    )

    assert msgspec.json.encode([card]).decode() == (
        '[{"id":"GPU-a","count":10,"devmem":8192,"devcore":100,"type":"NVIDIA P4","mode":"mig",'
        '"migProfiles":[{"name":"1g.5gb","memoryMB":4864,"core":0,"sliceCount":0,"placements":[{"start":0,"size":1}]}]}]'
    )


def test_todays_text_and_both_old_ones_are_told_apart() -> None:
    card = RegisteredGpu(id="a", slots=10, memory=7680, cores=100, type="P4", numa=1, mode="hami-core", healthy=True)
    later = msgspec.structs.replace(card, index=2, mode="mig")

    assert (
        (card,) == decode_register("a,10,7680,100,P4,1,true:") == decode_register(msgspec.json.encode([card]).decode())
    )
    assert (later, later) == decode_register("a,10,7680,100,P4,1,T,2,mig::a,10,7680,100,P4,1,1,2,mig:")


OLD = "a,10,7680,100,P4,0,true"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OLD, "node annotation missing device separator"),
        ('gar"bage\n:', 'malformed node annotation segment: "gar\\"bage\\n"'),
        ("a,x,1,1,P4,0,true:", 'invalid count field: strconv.ParseInt: parsing "x": invalid syntax'),
        ("a,1,1,1_0,P4,0,true:", 'invalid core field: strconv.ParseInt: parsing "1_0": invalid syntax'),
        (
            "a,1,9999999999,1,P4,0,true:",
            'invalid memory field: strconv.ParseInt: parsing "9999999999": value out of range',
        ),
        ("a,1,1,1,P4,x,yes:", 'invalid health field: strconv.ParseBool: parsing "yes": invalid syntax'),
        (f"{OLD},x,m:", 'invalid index field: strconv.Atoi: parsing "x": invalid syntax'),
        (f"{OLD},1:", "unexpected field count 8 in node annotation"),
        (f"{OLD}:{OLD},-2,m:", "index field must not be negative: -2"),
    ],
)
def test_a_node_that_cannot_be_read_has_upstreams_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidAnnotation) as raised:
        decode_old_register(text)

    assert ("hami.io/node-nvidia-register", reason) == (raised.value.key, raised.value.reason)


@pytest.mark.parametrize("text", ["[", "[1]", '[{"id":1,"uuid":1}]', "[" * 5000, "\ud800["])
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidAnnotation):
        decode_register(text)


def asked(seconds: float) -> str:
    return f"{REQUESTING}_{NOW - timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"


@pytest.mark.parametrize(
    ("handshake", "allocatable", "expected"),
    [
        (None, 0, True),
        ("", 0, True),
        ("Reported 2026-03-04 05:06:07", 0, True),
        ("Deleted_2026", 1, True),
        (asked(59), 0, True),
        (asked(60), 0, False),
        (asked(60) + ".5", 0, True),
        (asked(60) + ",000001", 0, True),
        (asked(60), 1, True),
        (asked(-99), 0, True),
        ("Requesting_9999-12-31 23:59:59.9", 0, True),
        ("Requesting_0001-01-01 00:00:00", 0, False),
        ("Requesting", 0, True),
        ("Requesting_2020-02-30 00:00:00", 0, True),
        ("Requesting_2020-02-28T00:00:00", 0, True),
        ("Requesting_2020-02-28 0:00:00.5", 0, False),
        ("Requesting_2020-02-28 00:00:00 ", 0, True),
    ],
)
def test_a_node_is_unhealthy_a_minute_after_its_cards_are_gone(
    handshake: str | None, allocatable: int, expected: bool
) -> None:
    assert expected is is_plugin_alive(handshake, allocatable, NOW)


@given(st.integers())
def test_integers_have_their_size(number: int) -> None:
    if -(1 << 31) <= number < 1 << 31:
        assert number == parse_int(str(number))
    else:
        with pytest.raises(ValueError, match="value out of range"):
            parse_int(str(number))


def test_texts_are_quoted_as_go_quotes_them() -> None:
    assert '"a\\"b\\\\\\té"' == go_quoted('a"b\\\té')
