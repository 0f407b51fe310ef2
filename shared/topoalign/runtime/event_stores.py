"""
The stores on the bus: their subjects, their limits, and how they are created, changed and checked.

They are defined as data, with the field names of NATS' stream configuration, so that both buses and the documentation
use the same definitions. `create_or_change_stores` is the administrative step that creates missing stores and changes
those of another version (`topoalign stores apply`). It does not change limits on age and size, because an administrator
may have set them. Services do not create or change stores: an account that may manage streams may publish on every
subject, so no service has this permission.

The subjects of the stores of facts are derived from the table of events (`wire.SUBJECTS`).

The limits on age and size can delete old events. State never depends on old events: allocators publish snapshots, and
only the newest messages about a node's hardware and reservations matter.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

import msgspec

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import BusRefused, BusUnavailable, clean
from topoalign.core.ports import MOST_IN_BATCH, Message, Stream
from topoalign.core.wire import LARGEST_BODY, PREFIX, STORED, SUBJECTS

SECOND = 1_000_000_000
"""NATS writes durations in nanoseconds."""
DAY = 24 * 3600 * SECOND

SCHEMA = {"topoalign.owner": "topoalign", "topoalign.schema": "1"}
"""Written into every store: its owner, and the version of these settings."""

ANSWERED = ("admission", "allocator", "discovery", "hints", "devices", "registry", "stored")
"""First tokens that no store may contain: those of requests, which NATS would acknowledge, and that of `NEWS`."""
NOT_FOUND = 10059
NAME_IN_USE = 10058
"""NATS' error codes for a stream that does not exist, and for one that exists with another configuration."""
SUBJECTS_OVERLAP = 10065
NO_JETSTREAM = 10039
"""NATS' error code for a request from an account without JetStream, for example that of a node."""


NEWS = f"{PREFIX}.stored"
"""
After a store has stored a message on `topoalign.v1.<rest>`, NATS publishes it with its position on
`topoalign.v1.stored.<rest>` (`republish` of the stream configuration).
"""


class Republish(msgspec.Struct, frozen=True, kw_only=True):
    """The subjects on which NATS announces stored messages."""

    src: str = f"{PREFIX}.>"
    dest: str = f"{NEWS}.>"
    headers_only: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether NATS republishes only headers with the position. A follower reads the large messages that it needs."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """One store, as NATS' stream configuration."""

    name: str
    description: str
    subjects: tuple[str, ...]
    max_age: int
    """Nanoseconds; 0: no limit."""
    max_bytes: int
    """NATS reserves this much of its `max_file_store`."""
    max_msgs_per_subject: int = -1
    duplicate_window: int = 600 * SECOND
    """Time within which a repeated message id is stored once. No outbox waits as long between two tries."""
    discard: str = "old"
    retention: str = "limits"
    storage: str = "file"
    max_msgs: int = -1
    num_replicas: int = 1
    allow_atomic: bool = False
    allow_direct: bool = True
    """Followers read with `$JS.API.DIRECT.GET.<stream>`, which needs no consumer."""
    republish: Republish = Republish()
    metadata: dict[str, str] = msgspec.field(default_factory=SCHEMA.copy)


def stream_subjects(stream: Stream) -> tuple[str, ...]:
    """The subjects of a stream: those of the events that are stored there."""
    patterns = (pattern for event, (pattern, _) in SUBJECTS.items() if STORED[event] is stream)
    derived = (f"{PREFIX}.{pattern.split('.')[0]}.>" for pattern in patterns)
    return tuple(dict.fromkeys(derived))


ALLOCATIONS = Store(
    name=Stream.ALLOCATIONS,
    description="Allocations, in the order in which they became true.",
    subjects=stream_subjects(Stream.ALLOCATIONS),
    max_age=30 * DAY,
    max_bytes=512 * MIB,  # about 800,000 events
)
RESERVATIONS = Store(
    name=Stream.RESERVATIONS,
    description="What the registries reserve: the newest message of a node has all its reservations.",
    subjects=stream_subjects(Stream.RESERVATIONS),
    max_age=0,
    max_bytes=128 * MIB,
    max_msgs_per_subject=64,
    allow_atomic=True,  # a gang is reserved on all its nodes, or on none
)
NODES = Store(
    name=Stream.NODES,
    description="The newest hardware, health and usage facts of every node.",
    subjects=stream_subjects(Stream.NODES),
    max_age=0,  # a node that has not changed for a year is still there
    # Each node has up to five topologies (up to 40 kB each) and five usages (14 kB each with 30 pods, 48 kB with 100).
    # So the store has space for 3,900 nodes with 30 pods or 2,400 nodes with 100. If no topology ever changed, these
    # numbers are 9,700 and 3,800. If the store is full, NATS deletes the oldest facts. A writer whose newest fact was
    # deleted publishes it again within a minute.
    max_bytes=1024 * MIB,
    max_msgs_per_subject=5,
    republish=Republish(headers_only=True),
)
DEADLETTERS = Store(
    name=Stream.DEADLETTERS,
    description="Messages that could not be decoded or applied, with the reason.",
    subjects=("topoalign.v1.deadletter.>",),
    max_age=7 * DAY,
    max_bytes=32 * MIB,
)
STORES = (ALLOCATIONS, RESERVATIONS, NODES, DEADLETTERS)

BOUNDS = ("max_age", "max_bytes", "max_msgs", "num_replicas", "storage", "duplicate_window", "max_msgs_per_subject")
"""Fields that an administrator may change; `create_or_change_stores` keeps their values."""
FOREIGN = ("mirror", "sources", "subject_transform", "allow_msg_schedules", "allow_rollup_hdrs", "allow_msg_ttl")
"""Fields that must not be set: with them a store could contain messages that no service published, or lack messages."""

Request = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a request to NATS' JetStream API and returns the response; raises BusUnavailable and BusRefused."""


class StoreRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """The error in an answer of NATS."""

    code: int
    err_code: int = 0
    description: str = ""


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """The number of messages in a stream, and its first and last position."""

    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """NATS' information about a stream, or an error."""

    config: dict[str, object] = {}
    state: StreamState = StreamState()
    created: str = ""
    error: StoreRefusal | None = None


def store_of(message: Message) -> Stream:
    """The stream that stores this message. Raises BusRefused if there is none, or if the message is too large."""
    check_size(message.subject, message.body)
    for store in STORES:
        if any(matches_subject(pattern, message.subject) for pattern in store.subjects):
            return Stream(store.name)
    raise BusRefused(f"no store takes {clean(message.subject, 200)}", "publish on the subjects of topoalign only")


def store_of_batch(messages: Sequence[Message]) -> Stream:
    """The stream of an atomic batch, RESERVATIONS. Raises BusRefused for others, a repeated subject or a long batch."""
    streams = {store_of(message) for message in messages}
    subjects = {message.subject for message in messages}
    if streams != {Stream.RESERVATIONS} or len(messages) > MOST_IN_BATCH or len(subjects) < len(messages):
        raise BusRefused(
            f"{len(messages)} messages cannot be one batch: they have {len(subjects)} subjects and {len(streams)} streams",
            f"publish 1 to {MOST_IN_BATCH} messages of {RESERVATIONS.name} at once, each on another subject",
        )
    return Stream.RESERVATIONS


def check_size(subject: str, body: bytes) -> None:
    """Raises BusRefused for a body that is larger than NATS accepts by default."""
    if len(body) > LARGEST_BODY:
        raise BusRefused(
            f"a message of {len(body)} bytes on {clean(subject, 200)} is more than {LARGEST_BODY}",
            "publish less in one message",
        )


@lru_cache(maxsize=4096)
def matches_subject(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern: `*` stands for one token, `>` at the end for one or more."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def has_only(stream: Stream, pattern: str) -> bool:
    """Whether every message of a stream has a subject that matches this pattern."""
    taken = next(store.subjects for store in STORES if store.name == stream)
    return pattern.endswith(">") and all(matches_subject(pattern, subject) for subject in taken)


async def create_or_change_stores(request: Request, replicas: int | None) -> list[str]:
    """
    Creates missing stores and changes those that differ, except fields in `BOUNDS`. Returns a line per change.

    `replicas` is 1 or 3; None: a new store gets 1, and an existing one keeps its number. Raises BusUnavailable, and
    BusRefused with the store and the reason, also for a stream of this name that is not topoalign's.
    """
    changes: list[str] = []
    for store in STORES:
        info = await stream_info(request, store.name)
        if info.error is not None and info.error.err_code == NOT_FOUND:
            wanted = msgspec.structs.replace(store, num_replicas=replicas or store.num_replicas)
            verb = "CREATE"
            done = f"created {store.name}"
        elif info.error is not None:
            raise store_error(f"store {store.name}", info.error)
        else:
            check_owner(store, info.config)
            wanted = kept_bounds(store, info.config, replicas)
            changed = changed_fields(wanted, info.config)
            if not changed:
                continue
            verb = "UPDATE"
            done = f"changed {', '.join(changed)} of {store.name}"
        answer = await request(f"$JS.API.STREAM.{verb}.{store.name}", msgspec.json.encode(wanted))
        error = msgspec.json.decode(answer, type=Info).error
        if error is not None and error.err_code == NAME_IN_USE:  # another client has created it meanwhile
            continue
        if error is not None:
            raise store_error(f"store {store.name}", error)
        changes.append(done)
    return changes


async def stream_info(request: Request, name: str) -> Info:
    """The configuration and state of a stream, or the error of the server."""
    return msgspec.json.decode(await request(f"$JS.API.STREAM.INFO.{name}", b""), type=Info)


def check_owner(wanted: Store, found: dict[str, object]) -> None:
    """Raises BusRefused for a stream that `create_or_change_stores` has not created."""
    metadata = found.get("metadata")
    tags = metadata if isinstance(metadata, dict) else {}
    for name, value in wanted.metadata.items():
        if tags.get(name) != value:
            raise BusRefused(
                f"store {wanted.name}: metadata[{name}] is {clean(repr(tags.get(name)))}, expected {value!r}",
                f"a stream of this name is not topoalign's: move it away with `nats stream backup {wanted.name}` and "
                f"`nats stream rm {wanted.name}`, then run `topoalign stores apply`",
            )


def changed_fields(wanted: Store, found: dict[str, object]) -> list[str]:
    """The fields of a stream that differ from the wanted ones, except metadata and description."""
    expected: dict[str, object] = msgspec.json.decode(msgspec.json.encode(wanted))
    expected |= dict.fromkeys(FOREIGN)
    compared = expected.keys() - {"description", "metadata"}
    # NATS omits empty fields.
    return [
        field for field in expected if field in compared and (expected[field] or None) != (found.get(field) or None)
    ]


def kept_bounds(store: Store, found: dict[str, object], replicas: int | None) -> Store:
    """The store with the limits of the existing stream, and with `replicas` replicas unless that is None."""
    bounds = {field: found[field] for field in BOUNDS if field in found}
    kept = msgspec.convert(msgspec.to_builtins(store) | bounds, Store)
    return kept if replicas is None else msgspec.structs.replace(kept, num_replicas=replicas)


def store_error(what: str, refusal: StoreRefusal) -> BusRefused | BusUnavailable:
    """Turns an error of NATS into an exception. A cluster that elects a leader answers 503, which is temporary."""
    text = clean(refusal.description or f"error {refusal.code}", 200)
    if refusal.code in (408, 503) and refusal.err_code not in (10023, NO_JETSTREAM):
        return BusUnavailable(f"{what}: NATS reports {text!r} ({refusal.err_code})")
    if refusal.err_code in (10023, 10047, 10028):
        remedy = "increase `max_file_store` of the NATS server, or reduce `max_bytes` of the store"
    elif refusal.err_code == NO_JETSTREAM:
        remedy = "use the credentials of the administrator of NATS, or enable JetStream for the account"
    elif refusal.err_code == SUBJECTS_OVERLAP:
        remedy = "another stream has these subjects: find it with `nats stream ls`; delete it or take them out of it"
    else:
        remedy = "look up the NATS error code and check the account's JetStream limits and permissions"
    return BusRefused(f"{what}: NATS refuses: {text} ({refusal.err_code})", remedy)
