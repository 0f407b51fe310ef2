"""
Encodes facts and requests for the bus: subjects, headers, JSON. One explicit table has the subjects of all events.

The format is a public contract (docs/events.md): CloudEvents 1.0 in binary mode with NATS headers. The body is one
event as JSON. A node's name is encoded as one reversible subject token, because Kubernetes names contain dots.
"""

import hashlib
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote

import msgspec

from topoalign.core.model import events
from topoalign.core.model.errors import (
    BadRequest,
    Failure,
    NoFit,
    RemoteFailure,
    TopoalignError,
    Undecodable,
    clean,
    remote,
)
from topoalign.core.model.events import Event, Fact, Reading, ReservationsChanged, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.maintenance import Override
from topoalign.core.model.topology.topology_checks import check_bounds
from topoalign.core.ports import Message, Stream

T = TypeVar("T")

PREFIX = "topoalign.v1"
LARGEST_BODY = 1_000_000
"""Bytes; NATS refuses more than 1 MiB by default."""

PLAIN = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Characters that are not escaped in headers, besides letters and digits. `%` is escaped, because it begins escapes."""

EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
BATCH_ID = "Nats-Batch-Id"
BATCH_SEQUENCE = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"
"""Headers with which NATS stores a message only on a condition, or as part of an atomic batch (NATS ADR-50)."""

VARYING = frozenset(
    {"ce-time", "topoalign-time", "traceparent", "tracestate", EXPECTED_LAST, BATCH_ID, BATCH_SEQUENCE, BATCH_COMMIT}
)
"""Headers in which a repetition can differ from the first message with its id."""

SUBJECTS: dict[type[Fact], tuple[str, str]] = {
    TopologyDiscovered: ("topology.{node}", "discovery-topology"),
    events.DeviceHealthChanged: ("health.{node}", "discovery-health"),
    events.UsageObserved: ("usage.{node}", "allocator-usage"),
    events.AllocationGranted: ("allocation.{node}.granted", "allocator"),
    events.AllocationBound: ("allocation.{node}.bound", "allocator"),
    events.AllocationReleased: ("allocation.{node}.released", "allocator"),
    events.AllocationRefused: ("allocation.{node}.refused", "allocator"),
    events.AllocationDeviated: ("allocation.{node}.deviated", "allocator"),
    events.AllocationsSnapshot: ("allocation.{node}.snapshot", "allocator"),
    ReservationsChanged: ("reservation.{node}", "registry"),
}
"""Event -> its subject below the prefix, and the writer's part of its id."""

KINDS = frozenset(f"{PREFIX}.{event.__name__}" for event in SUBJECTS)
"""The known values of `ce-type`. Other versions of this contract, such as `topoalign.v2.…`, are unknown here."""

STORED: dict[type[Fact], Stream] = {
    event: Stream.NODES if issubclass(event, Reading) else Stream.ALLOCATIONS for event in SUBJECTS
} | {ReservationsChanged: Stream.RESERVATIONS}
"""Event -> the stream that keeps it: readings, entries of the journal, and reservations, which registries write."""

READINGS = {
    pattern.split(".")[0]: writer.split("-")[0]
    for event, (pattern, writer) in SUBJECTS.items()
    if STORED[event] is Stream.NODES
}
"""Kind of reading, as named in `WriterPosition.readings` -> the service that publishes it."""

OF_REGISTRIES = frozenset({"alive", "announce", "confirm", "explain", "library-use", "snapshot"})
"""Requests to an allocator that registries send, too. They have separate subjects, which NATS accounts can allow."""

REMEMBERED = 10_000
"""Maximum number of names whose tokens are cached. A registry needs the token of a node for each of its events."""

_SAFE = re.compile(r"[A-Za-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@lru_cache(REMEMBERED)
def encode_node_token(name: str) -> str:
    """Encodes a name as one subject token. Bytes except letters, digits, `_` and `-` become `=` and two hex digits."""
    return "".join(c if _SAFE.match(c) else "".join(f"={byte:02X}" for byte in c.encode()) for c in name)


def decode_node_token(node_token: str) -> NodeName:
    """Decodes the name in a token from `encode_node_token`. Raises Undecodable for any other token."""
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), node_token).encode("latin-1", "replace")
    try:
        name = NodeName(raw.decode())
    except UnicodeDecodeError as error:
        raise Undecodable(f"subject token {clean(node_token)!r}", "not UTF-8") from error
    if encode_node_token(name) != node_token:
        raise Undecodable(f"subject token {clean(node_token)!r}", "not written by topoalign")
    return name


def subject(event: Event) -> str:
    """The subject on which this event is published."""
    return f"{PREFIX}.{SUBJECTS[type(event)][0].format(node=encode_node_token(event.node))}"


def event_id(event: Event) -> str:
    """The id `<writer>.<node token>.<epoch>.<seq or revision>`. As a writer, a registry adds its own id."""
    number = event.revision if isinstance(event, Reading) else event.seq
    writer = SUBJECTS[type(event)][1]
    writer = f"{writer}-{encode_node_token(event.writer)}" if isinstance(event, ReservationsChanged) else writer
    return f"{writer}.{encode_node_token(event.node)}.{event.epoch}.{number}"


def encode_event(event: Event, time: float) -> Message:
    """Encodes an event of `time` (wall seconds) as a message."""
    name = type(event).__name__
    writer = SUBJECTS[type(event)][1].split("-")[0]
    headers = {
        "Nats-Msg-Id": event_id(event),
        "ce-specversion": "1.0",
        "ce-id": event_id(event),
        "ce-type": f"{PREFIX}.{name}",
        "ce-source": f"/topoalign/{writer}/{encode_node_token(event.node)}",
        "ce-time": datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "ce-datacontenttype": "application/json",
    }
    return Message(
        subject=subject(event),
        headers={key: quote(value, safe=PLAIN) for key, value in headers.items()},
        body=msgspec.json.encode(event),
    )


def is_repetition(stored: Message, message: Message) -> bool:
    """Whether a stored message has the same subject, body and headers, except those of `VARYING`."""
    return (
        stored.subject == message.subject
        and stored.body == message.body
        and {name: value for name, value in stored.headers.items() if name not in VARYING}
        == {name: value for name, value in message.headers.items() if name not in VARYING}
    )


def with_message_mark(message: Message, mark: str) -> Message:
    """Returns the same message with the id `<id>.<mark>`. The fold recognises repetitions only by the body."""
    name = f"{message.headers['Nats-Msg-Id']}.{mark}"
    return msgspec.structs.replace(message, headers={**message.headers, "Nats-Msg-Id": name, "ce-id": name})


def decode_event(message: Message) -> Event:
    """Decodes an event. Raises UnknownEvent for an unknown type, and Undecodable for any other invalid message."""
    what = f"message on {clean(message.subject)}"
    if len(message.body) > LARGEST_BODY:
        raise Undecodable(what, f"{len(message.body)} bytes, more than {LARGEST_BODY}")
    kind = message.headers.get("ce-type", "")
    if kind.startswith("topoalign.") and kind not in KINDS:
        raise UnknownEvent(kind)
    if message.headers.get("ce-specversion", "1.0").partition(".")[0] != "1":
        raise Undecodable(what, f"CloudEvents version {clean(message.headers['ce-specversion'])!r}")
    try:
        event = _decoder.decode(message.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(what, clean(str(error), 200)) from error
    if subject(event) != message.subject:
        raise Undecodable(what, f"its body is {type(event).__name__} of node {clean(event.node)!r}")
    if isinstance(event, TopologyDiscovered):
        try:
            check_bounds(event.topology)
        except BadRequest as error:
            raise Undecodable(what, error.finding) from error
    return event


class UnknownEvent(BadRequest):
    """
    Raised for a well-formed event of a later version.

    Remedy: Update this program; until then the event is counted and not applied.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(f"event type {clean(kind)!r} is not known to this version", "update this program to see it")


def allocation_subjects(node: NodeName | None = None, kind: str | None = None) -> str:
    """The pattern of the allocation events of one node or of all nodes, of one kind or of all kinds."""
    if node is None and kind is None:
        return f"{PREFIX}.allocation.>"
    return f"{PREFIX}.allocation.{'*' if node is None else encode_node_token(node)}.{kind or '*'}"


def reservation_subject(node: NodeName | None = None) -> str:
    """The subject of one node's reservations, or the pattern that matches those of all nodes."""
    return f"{PREFIX}.reservation.{'*' if node is None else encode_node_token(node)}"


def hints_subject(node: NodeName) -> str:
    """The subject on which the hinting service of a node answers `HintQuestion`."""
    return f"{PREFIX}.hints.{encode_node_token(node)}"


def admission_subject(node: NodeName, verb: str) -> str:
    """The subject on which the node's allocator serves a verb. Verbs in `OF_REGISTRIES` have separate subjects."""
    return f"{PREFIX}.{'allocator' if verb in OF_REGISTRIES else 'admission'}.{encode_node_token(node)}.{verb}"


def discovery_subject(node: NodeName, verb: str) -> str:
    """
    The subject on which the node's discovery serves a verb: `alive` (positions of the last published facts),
    `published` (digests of these facts), `announce` (publishes everything again), `use` (current use of the GPUs).
    """
    return f"{PREFIX}.discovery.{encode_node_token(node)}.{verb}"


def foreign_subject() -> str:
    """The subject on which a registry is asked which nodes HAMi manages."""
    return f"{PREFIX}.registry.foreign"


def body_digest(body: bytes) -> str:
    """32 hex digits of a message's body as its writer encoded it, independent of the version that reads it."""
    return hashlib.sha256(body).hexdigest()[:32]


def devices_subject(node: NodeName, word: Override) -> str:
    """The subject on which discovery takes an operator's commands about devices."""
    return f"{PREFIX}.devices.{encode_node_token(node)}.{word}"


def encode_answer(result: object) -> bytes:
    """Encodes a result as the body of an answer."""
    return msgspec.json.encode({"ok": result})


def encode_error(error: TopoalignError) -> bytes:
    """Encodes an error as the body of an answer."""
    fault = "request" if isinstance(error, BadRequest) else "fit" if isinstance(error, NoFit) else "service"
    code = error.failure.code if isinstance(error, RemoteFailure) else error.code
    return msgspec.json.encode({"failure": Failure(fault=fault, code=code, finding=error.finding, remedy=error.remedy)})


def is_service_answer(body: bytes) -> bool:
    """Whether this is the body of an answer of a service, and not an acknowledgement of NATS."""
    try:
        return not {"ok", "failure"}.isdisjoint(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def decode_answer(body: bytes, kind: type[T]) -> T:
    """Decodes the result in an answer. Raises the error in the answer, or Undecodable."""
    try:
        reply = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "failure" in reply:
            raise remote(msgspec.json.decode(reply["failure"], type=Failure))
        return msgspec.json.decode(reply["ok"], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError) as error:
        raise Undecodable("an answer", clean(str(error), 200)) from error


def decode_request(body: bytes, kind: type[T]) -> T:
    """Decodes a request. Raises Undecodable, which names the wrong field."""
    if len(body) > LARGEST_BODY:
        raise Undecodable("the request", f"{len(body)} bytes, more than {LARGEST_BODY}")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable("the request", clean(str(error), 200)) from error
