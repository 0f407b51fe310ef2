"""The words of the contract as subscribers spell them: subjects, repetitions, dead letters, sizes and answers."""

import hashlib

import msgspec
import pytest

from topoalign.client.subscriber import dead_letter
from topoalign.core import wire
from topoalign.core.model.errors import (
    BadRequest,
    BusRefused,
    Contradiction,
    Failure,
    NotFound,
    RemoteBadRequest,
    RemoteNoFit,
    RemoteUnavailable,
    TooMuchWork,
    TopoalignError,
    Undecodable,
)
from topoalign.core.model.events import Allocation, AllocationGranted, HealthState, TopologyDiscovered
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.model import NumaNode, Topology
from topoalign.core.ports import Message, Stream

NODE = NodeName("gpu-1.example.com")
GRANTED = wire.encode_event(
    AllocationGranted(node=NODE, epoch=1, seq=2, allocation=Allocation(id=AllocationID("a"))), 1_700_000_000.0
)
SUBJECTS = {
    "TopologyDiscovered": ("topoalign.v1.topology.gpu-1=2Eexample=2Ecom", "discovery-topology", Stream.NODES),
    "DeviceHealthChanged": ("topoalign.v1.health.gpu-1=2Eexample=2Ecom", "discovery-health", Stream.NODES),
    "UsageObserved": ("topoalign.v1.usage.gpu-1=2Eexample=2Ecom", "allocator-usage", Stream.NODES),
    **{
        f"Allocation{kind.title()}": (
            f"topoalign.v1.allocation.gpu-1=2Eexample=2Ecom.{kind}",
            "allocator",
            Stream.ALLOCATIONS,
        )
        for kind in ("granted", "bound", "released", "refused", "deviated")
    },
    "AllocationsSnapshot": ("topoalign.v1.allocation.gpu-1=2Eexample=2Ecom.snapshot", "allocator", Stream.ALLOCATIONS),
    "ReservationsChanged": ("topoalign.v1.reservation.gpu-1=2Eexample=2Ecom", "registry", Stream.RESERVATIONS),
}
"""Event -> its subject, who says it, the stream that keeps it."""


def test_every_event_has_the_subject_and_the_stream_of_the_contract() -> None:
    """Other programs subscribe to these words: they never change within v1."""
    token = "gpu-1=2Eexample=2Ecom"
    found = {
        event.__name__: (f"topoalign.v1.{pattern.format(node=token)}", writer, wire.STORED[event])
        for event, (pattern, writer) in wire.SUBJECTS.items()
    }

    assert SUBJECTS == found
    assert token == wire.encode_node_token(NODE)
    assert {f"topoalign.v1.{name}" for name in SUBJECTS} == wire.KINDS
    assert {"topology": "discovery", "health": "discovery", "usage": "allocator"} == wire.READINGS
    assert ["TOPOALIGN_ALLOCATIONS", "TOPOALIGN_RESERVATIONS", "TOPOALIGN_NODES", "TOPOALIGN_DEADLETTERS"] == [*Stream]
    assert ["unknown", "healthy", "unhealthy"] == [*HealthState]


def test_questions_have_the_subjects_of_the_contract() -> None:
    node = "gpu-1=2Eexample=2Ecom"

    assert f"topoalign.v1.hints.{node}" == wire.hints_subject(NODE)
    assert f"topoalign.v1.admission.{node}.what-if" == wire.admission_subject(NODE, "what-if")
    assert f"topoalign.v1.allocator.{node}.alive" == wire.admission_subject(NODE, "alive")
    assert f"topoalign.v1.devices.{node}.cordon" == wire.devices_subject(NODE, "cordon")
    assert f"topoalign.v1.discovery.{node}.announce" == wire.discovery_subject(NODE, "announce")
    assert f"topoalign.v1.discovery.{node}.alive" == wire.discovery_subject(NODE, "alive")
    assert f"topoalign.v1.discovery.{node}.published" == wire.discovery_subject(NODE, "published")
    assert f"topoalign.v1.allocation.{node}.*" == wire.allocation_subjects(NODE)
    assert "topoalign.v1.allocation.>" == wire.allocation_subjects()


@pytest.mark.parametrize("header", ["ce-time", "topoalign-time", "traceparent", "tracestate"])
def test_a_repetition_may_differ_in_times_and_traces(header: str) -> None:
    again = msgspec.structs.replace(GRANTED, headers={**GRANTED.headers, header: "x"})

    assert wire.is_repetition(GRANTED, again)
    assert wire.is_repetition(again, GRANTED)


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(GRANTED, subject="topoalign.v1.allocation.x.granted"),
        msgspec.structs.replace(GRANTED, body=GRANTED.body + b" "),
        msgspec.structs.replace(GRANTED, headers={**GRANTED.headers, "ce-type": "x"}),
        msgspec.structs.replace(GRANTED, headers={**GRANTED.headers, "extra": ""}),
    ],
)
def test_what_differs_in_anything_else_is_no_repetition(other: Message) -> None:
    assert not wire.is_repetition(GRANTED, other)
    assert not wire.is_repetition(other, GRANTED)


def test_a_renamed_message_has_another_id_and_is_otherwise_the_same() -> None:
    got = wire.with_message_mark(GRANTED, "5f0c")

    name = f"{GRANTED.headers['Nats-Msg-Id']}.5f0c"
    assert {**GRANTED.headers, "Nats-Msg-Id": name, "ce-id": name} == got.headers
    assert (GRANTED.subject, GRANTED.body) == (got.subject, got.body)
    assert wire.decode_event(GRANTED) == wire.decode_event(got)


@pytest.mark.parametrize(
    ("version", "read"), [("1.0", True), ("1.9", True), ("2.0", False), ("10", False), ("", False)]
)
def test_events_of_cloudevents_1_are_read(version: str, read: bool) -> None:
    message = msgspec.structs.replace(GRANTED, headers={"ce-specversion": version})

    if read:
        assert wire.decode_event(GRANTED) == wire.decode_event(message)
        return
    with pytest.raises(Undecodable, match=f"CloudEvents version {version!r}"):
        wire.decode_event(message)


def test_kinds_of_others_are_no_events_of_a_later_version() -> None:
    """Only what calls itself ours may be passed over as unknown; the rest is judged by its body."""
    foreign = msgspec.structs.replace(GRANTED, headers={"ce-type": "com.example.thing"})

    assert wire.decode_event(GRANTED) == wire.decode_event(foreign)
    with pytest.raises(wire.UnknownEvent, match=r"'topoalign\.v2\.Granted' is not known") as caught:
        wire.decode_event(msgspec.structs.replace(GRANTED, headers={"ce-type": "topoalign.v2.Granted"}))
    assert "UnknownEvent" == caught.value.code


def test_a_body_has_a_million_bytes_at_most() -> None:
    padded = GRANTED.body[:-1] + b" " * (1_000_000 - len(GRANTED.body)) + b"}"
    question = b'{"node":"n"' + b" " * (1_000_000 - 12) + b"}"

    assert 1_000_000 == len(padded) == len(question)
    assert wire.decode_event(GRANTED) == wire.decode_event(msgspec.structs.replace(GRANTED, body=padded))
    assert "n" == wire.decode_request(question, NodeRequest).node
    with pytest.raises(Undecodable, match="1000001 bytes, more than 1000000"):
        wire.decode_event(msgspec.structs.replace(GRANTED, body=padded + b" "))
    with pytest.raises(Undecodable, match=r"the request.*1000001 bytes, more than 1000000"):
        wire.decode_request(question + b" ", NodeRequest)


def test_a_topology_that_would_take_gigabytes_is_undecodable() -> None:
    found = TopologyDiscovered(
        node=NODE, epoch=1, revision=1, boot_id="b", source="s", topology=Topology(nodes=(NumaNode(id=70_000),))
    )

    with pytest.raises(Undecodable, match="there can be no NUMA node 70000"):
        wire.decode_event(wire.encode_event(found, 0.0))


def test_a_dead_letter_has_the_message_and_the_reason_cut_to_size() -> None:
    """A header keeps 300 characters and the body a million bytes: it must fit where the message itself has."""
    headers = {name: name[0] * 301 for name in ("ce-id", "ce-source", "ce-time", "ce-specversion", "traceparent", "x")}
    message = Message(subject="a b", headers=headers | {"ce-datacontenttype": "é"}, body=b"x" * 1_000_001)

    letter = dead_letter("my.service", message, Contradiction("n", "y" * 400), 7.9)

    assert "topoalign.v1.deadletter.my=2Eservice" == letter.subject
    assert {name: name[0] * 300 for name in headers if name != "x"} | {
        "ce-datacontenttype": "%C3%A9",
        "topoalign-subject": "a%20b",
        "topoalign-reason": f"node%20n%3A%20{'y' * 291}%E2%80%A6",
        "topoalign-time": "7",
    } == letter.headers
    assert b"x" * 1_000_000 == letter.body


@pytest.mark.parametrize(
    ("error", "fault", "kind"),
    [
        (NotFound("node", "n", "look"), "request", RemoteBadRequest),
        (TooMuchWork("found", "do"), "fit", RemoteNoFit),
        (BusRefused("found", "do"), "service", RemoteUnavailable),
        (Contradiction("n", "found"), "service", RemoteUnavailable),
    ],
)
def test_a_failure_is_answered_with_its_fault_and_its_code(
    error: TopoalignError, fault: str, kind: type[TopoalignError]
) -> None:
    """The code stays that of who failed first, also where a service passes on what another one answered."""
    body = wire.encode_error(error)

    expected = {"fault": fault, "code": error.code, "finding": error.finding, "remedy": error.remedy}
    assert {"failure": expected | {"type": "Failure"}} == msgspec.json.decode(body)
    with pytest.raises(kind) as caught:
        wire.decode_answer(body, int)
    assert msgspec.json.decode(body) == msgspec.json.decode(wire.encode_error(caught.value))


def test_an_answer_is_the_result_or_undecodable() -> None:
    assert b'{"ok":5}' == wire.encode_answer(5)
    assert 5 == wire.decode_answer(wire.encode_answer(5), int)
    for body in (b"", b"[]", b"{}", b'{"ok":"x"}', b'{"failure":5}', b"[" * 100_000):
        with pytest.raises(Undecodable):
            wire.decode_answer(body, int)


@pytest.mark.parametrize("odd", ["=GG", "=2", "=C3", "a.b", "=41", "=", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"])
def test_a_token_that_is_never_made_stands_for_no_name(odd: str) -> None:
    with pytest.raises(Undecodable, match="subject token"):
        wire.decode_node_token(odd)


def test_a_digest_of_a_body_is_that_of_its_bytes() -> None:
    assert hashlib.sha256(b"x").hexdigest()[:32] == wire.body_digest(b"x")


def test_errors_of_the_contract_are_the_askers_fault() -> None:
    """What cannot be read, and what a later version says, will be the same when it is sent again."""
    assert issubclass(wire.UnknownEvent, BadRequest) and issubclass(Undecodable, BadRequest)
    assert Failure(fault="fit", code="c", finding="f", remedy="r") == msgspec.json.decode(
        b'{"type":"Failure","fault":"fit","code":"c","finding":"f","remedy":"r"}', type=Failure
    )
