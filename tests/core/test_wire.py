"""What goes over the wire comes back as it was, and what never was an event is refused in one way only."""

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.client.subscriber import dead_letter
from topoalign.core import wire
from topoalign.core.model.errors import (
    BusUnavailable,
    NotFound,
    RemoteBadRequest,
    RemoteUnavailable,
    TopoalignError,
    Undecodable,
)
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealth,
    DeviceHealthChanged,
    Event,
    Fact,
    HealthState,
    MemoryBlock,
    MemoryUse,
    Owner,
    Reading,
    ReservationsChanged,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules, ListedDevices
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Message

text = st.text(max_size=20)
numbers = st.integers(0, 2**53)
owners = st.builds(Owner, namespace=text, pod=text, container=text)
blocks = st.integers(0, 3).flatmap(
    lambda size: st.builds(
        MemoryBlock,
        resource=text,
        nodes=st.tuples(*[st.integers(0, 255)] * size),
        size=numbers,
        taken=st.tuples(*[numbers] * size),
    )
)
allocations = st.builds(
    Allocation,
    id=text,
    owner=st.none() | owners,
    role=st.sampled_from(["init", "sidecar", "app"]),
    devices=st.dictionaries(text, st.lists(text, max_size=3).map(tuple), max_size=3),
    cpus=st.sampled_from(["", "0-3,8", "7"]),
    memory=st.lists(blocks, max_size=2).map(tuple),
    affinity=st.none() | st.lists(st.integers(0, 255), max_size=3).map(tuple),
)
place = {"node": st.text(min_size=1, max_size=60), "epoch": numbers}
ledger = {**place, "seq": numbers}
reading = {**place, "revision": numbers}
devices = st.dictionaries(text, st.lists(text, max_size=3).map(tuple), max_size=2)
kubelets = st.builds(
    KubeletObserved,
    version=text,
    rules=st.builds(
        KubeletRules,
        policy=text,
        scope=text,
        cpu_manager=text,
        cpu_options=st.lists(text, max_size=2).map(tuple),
        reserved_cpus=st.sampled_from(["", "0-3,8"]),
        memory_manager=text,
        reserved_memory=st.dictionaries(st.integers(0, 9), st.dictionaries(text, numbers, max_size=2), max_size=2),
        placement=text,
        unknown=text,
    ),
    devices=st.none()
    | st.dictionaries(
        text,
        st.lists(
            st.builds(
                ListedDevices,
                nodes=st.none() | st.lists(st.integers(-1, 9), max_size=2).map(tuple),
                ids=st.lists(text, max_size=2).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
        max_size=2,
    ),
    entries=st.lists(
        st.builds(
            CheckpointEntry,
            pod_uid=text,
            container=text,
            cpus=st.sampled_from(["", "0-3,8"]),
            memory=st.lists(blocks, max_size=2).map(tuple),
            devices=devices,
            mounted=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    dropped=st.dictionaries(text, devices, max_size=2),
    memory=st.dictionaries(st.integers(0, 9), st.builds(MemoryUse, assignments=numbers), max_size=2),
    notes=st.lists(text, max_size=2).map(tuple),
    started=st.none() | st.floats(0, 1e12),
)
MAKERS: dict[type[Fact], st.SearchStrategy[Fact]] = {
    ReservationsChanged: st.builds(
        ReservationsChanged,
        **ledger,
        writer=text,
        reservations=st.lists(
            st.builds(
                Reservation,
                pod_uid=text,
                namespace=text,
                pod=text,
                containers=st.lists(
                    st.builds(
                        ReservedContainer,
                        container=text,
                        devices=devices,
                        co_allocated=devices,
                        cpus=st.sampled_from(["", "0-3,8"]),
                        memory=st.lists(blocks, max_size=2).map(tuple),
                    ),
                    max_size=2,
                ).map(tuple),
                seconds_left=st.floats(0, 3600),
                gang=text,
            ),
            max_size=2,
        ).map(tuple),
        made=st.lists(text, max_size=2).map(tuple),
    ),
    TopologyDiscovered: st.builds(
        TopologyDiscovered, **reading, boot_id=text, source=text, topology=st.just(Topology())
    ),
    DeviceHealthChanged: st.builds(
        DeviceHealthChanged,
        **reading,
        devices=st.dictionaries(
            text, st.builds(DeviceHealth, state=st.sampled_from(HealthState), reason=text, cordoned=st.booleans())
        ),
    ),
    UsageObserved: st.builds(
        UsageObserved,
        **reading,
        containers=st.lists(
            st.builds(
                ContainerUsage,
                owner=owners,
                cpus=st.sampled_from(["", "0-3,8"]),
                memory=st.lists(blocks, max_size=2).map(tuple),
                devices=st.dictionaries(text, st.lists(text, max_size=3).map(tuple), max_size=2),
            ),
            max_size=3,
        ).map(tuple),
        containers_known=st.booleans(),
        kubelet=st.none() | kubelets,
    ),
    AllocationGranted: st.builds(AllocationGranted, **ledger, allocation=allocations),
    AllocationBound: st.builds(AllocationBound, **ledger, allocation=text, owner=owners),
    AllocationReleased: st.builds(AllocationReleased, **ledger, allocation=text, reason=text),
    AllocationRefused: st.builds(
        AllocationRefused,
        **ledger,
        namespace=text,
        pod=text,
        container=st.none() | text,
        reason=text,
        code=text,
        finding=text,
        remedy=text,
    ),
    AllocationDeviated: st.builds(
        AllocationDeviated,
        **ledger,
        allocation=text,
        preferred=st.lists(text, max_size=3).map(tuple),
        allocated=st.lists(text, max_size=3).map(tuple),
    ),
    AllocationsSnapshot: st.builds(
        AllocationsSnapshot,
        **ledger,
        allocations=st.lists(allocations, max_size=3).map(tuple),
        memory=st.dictionaries(
            st.integers(0, 255),
            st.builds(MemoryUse, reserved=st.dictionaries(text, numbers, max_size=2), assignments=st.integers(0, 9)),
            max_size=2,
        ),
        digest=text,
    ),
}
events = cast(st.SearchStrategy[Event], st.one_of(*MAKERS.values()))
GRANTED = wire.encode_event(
    AllocationGranted(node=NodeName("node-1"), epoch=1, seq=2, allocation=Allocation(id=AllocationID("a"))),
    1_700_000_000.25,
)


def test_every_event_of_the_table_is_tried_here() -> None:
    assert set(wire.SUBJECTS) == set(MAKERS)


@given(events, st.floats(0, 4e9))
def test_an_event_comes_back_as_it_was(event: Event, time: float) -> None:
    assert event == wire.decode_event(wire.encode_event(event, time))


@given(events)
def test_headers_and_subject_are_fit_for_the_wire(event: Event) -> None:
    """Printable ASCII without blanks in front or behind, as CloudEvents asks; node names of any kind are one token."""
    message = wire.encode_event(event, 0)

    assert all(value.isascii() and value.isprintable() and value.strip() == value for value in message.headers.values())
    assert not set(message.subject) & set(" \t\r\n*>")
    assert all(message.subject.split("."))
    assert message.headers["ce-id"] == message.headers["Nats-Msg-Id"] == wire.event_id(event)


def test_the_headers_are_those_of_the_contract() -> None:
    expected = {
        "Nats-Msg-Id": "allocator.node-1.1.2",
        "ce-specversion": "1.0",
        "ce-id": "allocator.node-1.1.2",
        "ce-type": "topoalign.v1.AllocationGranted",
        "ce-source": "/topoalign/allocator/node-1",
        "ce-time": "2023-11-14T22:13:20.250000Z",
        "ce-datacontenttype": "application/json",
    }

    assert expected == GRANTED.headers
    assert "topoalign.v1.allocation.node-1.granted" == GRANTED.subject


def test_each_reading_has_a_kind_of_its_own_and_a_service_that_says_it() -> None:
    """Readings are kept, compared and counted by kind: two of one kind would take the place of one another."""
    readings = [event for event in wire.SUBJECTS if issubclass(event, Reading)]

    assert len(readings) == len(wire.READINGS)
    assert {"topology": "discovery", "health": "discovery", "usage": "allocator"}.items() <= wire.READINGS.items()


@given(st.text())
def test_a_token_can_be_turned_back_into_the_name(name: str) -> None:
    """C42. A lone surrogate is not text that a name can hold: it cannot be written as UTF-8."""
    token = wire.encode_node_token(name)

    assert name == wire.decode_node_token(token)
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=")


@given(st.text(alphabet="ABCabc=.0123456789_-é%", max_size=12))
def test_only_one_token_stands_for_a_name(token: str) -> None:
    """Two spellings of one name would be two subjects for one node."""
    try:
        name = wire.decode_node_token(token)
    except Undecodable:
        return
    assert token == wire.encode_node_token(name)


def refused(message: Message) -> TopoalignError:
    with pytest.raises((Undecodable, wire.UnknownEvent)) as caught:
        wire.decode_event(message)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return caught.value


@pytest.mark.parametrize("number", [-1, 2**53 + 1, 2**63 - 1, 2**64])
@pytest.mark.parametrize("field", ["epoch", "seq", "revision"])
def test_a_number_beyond_exact_json_integers_is_refused_with_its_field(field: str, number: int) -> None:
    """
    A number that not every JSON reader holds exactly is refused with its field. F07: a revision after which no other
    can come is no revision.
    """
    events: list[Event] = [
        AllocationsSnapshot(node=NodeName("n"), epoch=4, seq=5, allocations=(), digest=""),
        DeviceHealthChanged(node=NodeName("n"), epoch=4, revision=6, devices={}),
    ]
    concerned = [msgspec.structs.replace(event, **{field: number}) for event in events if hasattr(event, field)]
    findings = [refused(wire.encode_event(event, 0.0)).finding for event in concerned]

    assert [True] * len(concerned) == [field in finding for finding in findings]
    assert concerned


@given(st.binary(max_size=200))
def test_random_bytes_are_undecodable(body: bytes) -> None:
    refused(msgspec.structs.replace(GRANTED, body=body))


@given(st.data())
def test_a_damaged_event_is_undecodable_or_another_event_of_the_same_node(data: st.DataObject) -> None:
    """C41: flipped, cut and inserted bytes never raise anything else, and never speak for another node."""
    body = bytearray(GRANTED.body)
    at = data.draw(st.integers(0, len(body) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            body[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del body[at:]
        case _:
            body[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        event = wire.decode_event(msgspec.structs.replace(GRANTED, body=bytes(body)))
    except (Undecodable, wire.UnknownEvent):
        return
    assert "node-1" == event.node


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 900_000,
        b'{"type":' * 100_000,
        GRANTED.body.replace(b'"seq":2', b'"seq":NaN'),
        GRANTED.body.replace(b'"seq":2', b'"seq":1e999'),
        GRANTED.body.replace(b'"seq":2', b'"seq":' + b"9" * 5_000),
        GRANTED.body.replace(b'"node":"node-1"', b'"node":"node-2"'),
        GRANTED.body.replace(b'"a"', b'"\xff\xfe"'),
        GRANTED.body.replace(b"AllocationGranted", b"AllocationReleased"),
        GRANTED.body.replace(b'{"id":"a"}', b'{"id":"a","cpus":"3-1"}'),
        GRANTED.body.replace(
            b'{"id":"a"}', b'{"id":"a","memory":[{"resource":"memory","nodes":[0,1],"size":1,"taken":[1]}]}'
        ),
        b'{"x":"' + b"a" * 1_000_000 + b'"}',
    ],
)
def test_poison_is_undecodable(body: bytes) -> None:
    """C41."""
    assert isinstance(refused(msgspec.structs.replace(GRANTED, body=body)), Undecodable)


OLD_USAGE = (
    b'{"type":"UsageObserved","node":"n","epoch":7,"revision":2,"containers":[{"owner":{"namespace":"default","pod":"db",'
    b'"container":"main"},"cpus":"0-3","devices":{"example.com/fpga":["f-0"]}}]}'
)
"""As the version before the kubelet's rules were announced wrote it."""


def test_usage_of_the_version_before_the_rules_is_read() -> None:
    """Its containers count, and that nothing is said of the kubelet is not taken for a rule."""
    event = wire.decode_event(Message(subject="topoalign.v1.usage.n", headers={}, body=OLD_USAGE))

    assert isinstance(event, UsageObserved)
    assert ("0-3", True, None) == (event.containers[0].cpus, event.containers_known, event.kubelet)
    assert OLD_USAGE == wire.encode_event(event, 0).body


def test_usage_with_more_of_the_kubelet_than_is_known_is_read() -> None:
    """A later version adds fields and policies; what is said of containers counts all the same."""
    rules = {
        "policy": "later",
        "scope": "rack",
        "cpu_manager": "later",
        "memory_manager": "None",
        "placement": "x",
        "new": 1,
    }
    whole = {**msgspec.json.decode(OLD_USAGE), "kubelet": {"rules": rules, "later": [1]}}
    event = wire.decode_event(Message(subject="topoalign.v1.usage.n", headers={}, body=msgspec.json.encode(whole)))

    assert isinstance(event, UsageObserved) and event.kubelet is not None
    assert "later" == event.kubelet.rules.policy


class OldUsage(Reading, frozen=True, kw_only=True, tag="UsageObserved"):
    """As the version before the kubelet's rules were announced has it."""

    containers: tuple[ContainerUsage, ...]


@given(MAKERS[UsageObserved])
def test_the_version_before_the_rules_reads_usage_with_them(event: UsageObserved) -> None:
    old = msgspec.json.decode(wire.encode_event(event, 0).body, type=OldUsage)

    assert (event.node, event.epoch, event.revision) == (old.node, old.epoch, old.revision)
    assert event.containers == old.containers


@pytest.mark.parametrize(
    "kubelet",
    [
        {"devices": {"a/b": [{"nodes": [70_000], "ids": ["x"]}]}},
        {"memory": {"70000": {}}},
        {"entries": [{"pod_uid": "u", "container": "c", "cpus": "1-"}]},
        {"rules": {"reserved_cpus": "99999999"}},
    ],
)
def test_usage_with_numbers_that_cannot_be_is_undecodable(kubelet: dict[str, Any]) -> None:
    """A mask of gigabytes must not get in."""
    rules = {"policy": "none", "scope": "pod", "cpu_manager": "none", "memory_manager": "None", "placement": "topology"}
    said = {**kubelet, "rules": {**rules, **kubelet.get("rules", {})}}
    whole = {**msgspec.json.decode(OLD_USAGE), "kubelet": said}

    with pytest.raises(Undecodable):
        wire.decode_event(Message(subject="topoalign.v1.usage.n", headers={}, body=msgspec.json.encode(whole)))


@pytest.mark.parametrize("cpus", [b"3-1", b"70000", b"x"])
def test_usage_with_a_bad_list_of_cpus_is_undecodable(cpus: bytes) -> None:
    """As an allocation is: whoever folds it need not expect worse."""
    body = OLD_USAGE.replace(b'"cpus":"0-3"', b'"cpus":"%s"' % cpus)

    with pytest.raises(Undecodable):
        wire.decode_event(Message(subject="topoalign.v1.usage.n", headers={}, body=body))


def test_an_event_on_the_subject_of_another_is_undecodable() -> None:
    for subject in ("topoalign.v1.allocation.node-2.granted", "topoalign.v1.allocation.node-1.released"):
        assert isinstance(refused(msgspec.structs.replace(GRANTED, subject=subject)), Undecodable)


def test_an_event_of_a_later_version_is_unknown_rather_than_undecodable() -> None:
    """C46: it is to be counted, and is nobody's mistake."""
    later = msgspec.structs.replace(
        GRANTED, headers={"ce-type": "topoalign.v1.AllocationBlessed"}, body=b'{"type":"x"}'
    )

    assert isinstance(refused(later), wire.UnknownEvent)


def test_a_field_of_a_later_version_does_no_harm() -> None:
    """C46."""
    newer = msgspec.structs.replace(GRANTED, body=GRANTED.body.replace(b'"seq":2', b'"seq":2,"mood":{"a":[1]}'))

    assert wire.decode_event(GRANTED) == wire.decode_event(newer)


@given(st.dictionaries(st.sampled_from(["ce-type", "ce-id", "x"]), text), st.binary(max_size=50), text)
def test_a_dead_letter_can_be_sent_whatever_the_message_was(headers: dict[str, str], body: bytes, subject: str) -> None:
    message = Message(subject=subject, headers={**headers, "ce-source": "%C0%A0"}, body=body)
    letter = dead_letter("registry", message, Undecodable("it", "never was \x1b[31m"), 5.5)

    assert all(value.isascii() and value.isprintable() and " " not in value for value in letter.headers.values())
    assert "%C0%A0" == letter.headers["ce-source"]
    assert "topoalign.v1.deadletter.registry" == letter.subject
    assert body == letter.body
    assert letter.headers["topoalign-reason"].isascii()


@pytest.mark.parametrize("name", ["ce-\x00", "ce-\x7f", "ce-extension", "Nats-Msg-Id", "Nats-Expected-Stream"])
def test_a_dead_letter_takes_over_no_header_that_events_do_not_have(name: str) -> None:
    """A client of NATS refuses to send some names, and the server obeys others."""
    message = Message(subject="x", headers={name: "y", "ce-type": "\udcff", "traceparent": "00-1-2-01"}, body=b"")
    letter = dead_letter("registry", message, Undecodable("it", "no event"), 5.5)

    names = {"ce-type", "traceparent", "topoalign-subject", "topoalign-reason", "topoalign-time"}
    assert names == letter.headers.keys()


def test_a_failure_comes_back_with_the_fault_and_code_of_the_other_side() -> None:
    """A failure comes back as an error of the same fault with the code of the other side."""
    for error, kind in (
        (NotFound("node", "n", "look"), RemoteBadRequest),
        (BusUnavailable("gone"), RemoteUnavailable),
    ):
        with pytest.raises(kind) as caught:
            wire.decode_answer(wire.encode_error(error), int)
        assert (error.code, error.finding, error.remedy) == (
            caught.value.failure.code,
            caught.value.finding,
            caught.value.remedy,
        )


@given(st.binary(max_size=100))
def test_an_answer_or_a_question_that_is_none_is_undecodable(body: bytes) -> None:
    with pytest.raises(TopoalignError):
        wire.decode_answer(b"\xff" + body, int)
    with pytest.raises(Undecodable):
        wire.decode_request(b"\xff" + body, NodeRequest)


def test_a_question_with_a_field_that_does_not_exist_names_it() -> None:
    with pytest.raises(Undecodable, match="colour"):
        wire.decode_request(b'{"node":"n","colour":"red"}', NodeRequest)
