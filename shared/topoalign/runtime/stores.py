"""
The stores on the bus: their subjects, their limits, and how they are created and checked.

They are data (the field names are those of NATS' stream configuration), so that the two buses and the documents agree.
The first client creates missing stores. An existing store is compared field by field and never changed: a store with
other settings may hold data that others rely on, so a difference is refused by name and left to the operator.

The subjects of the two stores of facts follow from the table of events (`wire.SUBJECTS`). A store that another version
has made may take fewer events or more. It is used for what it takes, as long as it has the subjects of `FIRST`.

The limits of age and bytes may cut off old events, because state never depends on old events: allocators publish
snapshots, and of a node's hardware only the newest facts matter.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from topoalign.core.model.errors import BusRefused, BusUnavailable, clean
from topoalign.core.ports import MOST_IN_BATCH, Message, Stream
from topoalign.core.wire import LARGEST_BODY, PREFIX, STORED, SUBJECTS

SECOND = 1_000_000_000
"""NATS writes durations in nanoseconds."""
MIB = 1024 * 1024
DAY = 24 * 3600 * SECOND

SCHEMA = {"topoalign.owner": "topoalign", "topoalign.schema": "1"}
"""Written into every store: whose it is, and the version of these settings."""

FIRST: dict[str, tuple[str, ...]] = {
    Stream.ALLOCATIONS: (f"{PREFIX}.allocation.>", f"{PREFIX}.reservation.>"),
    Stream.NODES: (f"{PREFIX}.topology.>", f"{PREFIX}.health.>", f"{PREFIX}.usage.>"),
}
"""Store -> what it takes in every version. Later events are not added here: stores that exist do not take them."""
ANSWERED = ("admission", "discovery", "hints", "devices", "selftest")
"""Subjects below the prefix that no store may take: NATS would answer there, and not the service that is asked."""
OF_EVENTS = re.compile(rf"{re.escape(PREFIX)}\.(?!(?:{'|'.join(ANSWERED)})\.)[a-z0-9_-]+\.>")
"""Subjects of one kind of event, of this version or another."""

NOT_FOUND = 10059
SUBJECTS_OVERLAP = 10065
"""NATS' error code of a stream that does not exist."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """One store, as NATS' stream configuration. KV buckets are streams named `KV_<bucket>`."""

    name: str
    description: str
    subjects: tuple[str, ...]
    max_age: int
    """Nanoseconds; 0 for ever."""
    max_bytes: int
    """NATS sets this much of its `max_file_store` aside."""
    max_msgs_per_subject: int = -1
    duplicate_window: int = 600 * SECOND
    """A message id heard again within it is stored once. Ten minutes: longer than any outbox waits between two tries."""
    discard: str = "old"
    retention: str = "limits"
    storage: str = "file"
    max_msgs: int = -1
    num_replicas: int = 1
    allow_atomic: bool = False
    allow_direct: bool = False
    allow_rollup_hdrs: bool = False
    deny_delete: bool = False
    metadata: dict[str, str] = msgspec.field(default_factory=SCHEMA.copy)


def subjects_of(stream: Stream) -> tuple[str, ...]:
    """What a stream takes: the subjects of `FIRST`, then those of the events that are stored there."""
    patterns = (pattern for event, (pattern, _) in SUBJECTS.items() if STORED[event] is stream)
    derived = (f"{PREFIX}.{pattern.split('.')[0]}.>" for pattern in patterns)
    return tuple(dict.fromkeys((*FIRST[stream], *derived)))


ALLOCATIONS = Store(
    name=Stream.ALLOCATIONS,
    description="Allocations and reservations, in the order in which they became true.",
    subjects=subjects_of(Stream.ALLOCATIONS),
    max_age=30 * DAY,
    max_bytes=512 * MIB,  # some 800,000 events
    allow_atomic=True,
)
NODES = Store(
    name=Stream.NODES,
    description="The newest hardware, health and usage facts of every node.",
    subjects=subjects_of(Stream.NODES),
    max_age=0,  # a node that has not changed for a year is still there
    # Five topologies of up to 40 kB of each node, and five usages: 14 kB each with 30 pods, 48 kB with 100. That is enough
    # for 3,900 nodes with 30 pods each, or 2,400 with 100; for 9,700 and 3,800 whose topology never changed. Beyond that
    # the oldest facts are cut off, and whose newest fact is gone says it anew within a minute.
    max_bytes=1024 * MIB,
    max_msgs_per_subject=5,
)
DEADLETTERS = Store(
    name=Stream.DEADLETTERS,
    description="Messages that could not be decoded or applied, with the reason.",
    subjects=("topoalign.v1.deadletter.>",),
    max_age=7 * DAY,
    max_bytes=32 * MIB,
)
RESERVATIONS = Store(
    name="KV_TOPOALIGN_RESERVATIONS",
    description="Key-value: node token -> the node's reservations, each with its own deadline.",
    subjects=("$KV.TOPOALIGN_RESERVATIONS.>",),
    max_age=0,
    max_bytes=32 * MIB,
    max_msgs_per_subject=1,
    duplicate_window=120 * SECOND,
    discard="new",
    allow_direct=True,
    allow_rollup_hdrs=True,
    deny_delete=True,
)
STORES = (ALLOCATIONS, NODES, DEADLETTERS, RESERVATIONS)

Request = Callable[[str, bytes], Awaitable[bytes]]
"""Asks NATS' JetStream API; raises BusUnavailable and BusRefused."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """NATS' own words for no."""

    code: int
    err_code: int = 0
    description: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The number of messages in a stream, and its first and last position."""

    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """What NATS says of a stream, or why it does not."""

    config: dict[str, object] = {}
    state: State = State()
    created: str = ""
    error: Refusal | None = None


class Narrow(msgspec.Struct, frozen=True, kw_only=True):
    """A store that an older version has made: it does not take every event of this one."""

    store: Store
    """As this version makes it."""
    taken: tuple[str, ...]
    """The subjects that it takes."""

    @property
    def error(self) -> BusRefused:
        """What it does not take, and how an operator changes that."""
        missing = [subject for subject in self.store.subjects if subject not in self.taken]
        whole = ",".join([*self.taken, *missing])
        return BusRefused(
            f"store {self.store.name} was made by an older version and does not take {', '.join(missing)}",
            f"`nats stream edit {self.store.name} --subjects '{whole}'`: what is stored stays",
        )

    def lacks(self, subject: str) -> bool:
        """Whether it would take this subject if this version had made it."""
        return takes(self.store.subjects, subject) and not takes(self.taken, subject)


def store_of(message: Message) -> Stream:
    """The stream that stores this message. Raises BusRefused if none does, or if the message is too large for a bus."""
    check_size(message.subject, message.body)
    for store in (ALLOCATIONS, NODES, DEADLETTERS):
        if takes(store.subjects, message.subject):
            return Stream(store.name)
    raise BusRefused(f"no store takes {clean(message.subject, 200)}", "publish on the subjects of topoalign only")


def store_of_batch(messages: Sequence[Message]) -> Stream:
    """
    The stream that stores these messages as one atomic batch. Raises BusRefused as `store_of` does, and if it is not one
    stream that takes batches, if there are too many or none, or two have the same subject.
    """
    streams = {store_of(message) for message in messages}
    subjects = {message.subject for message in messages}
    if streams != {Stream.ALLOCATIONS} or len(messages) > MOST_IN_BATCH or len(subjects) < len(messages):
        raise BusRefused(
            f"{len(messages)} messages on {len(subjects)} subjects of {len(streams)} streams are no batch",
            f"publish 1 to {MOST_IN_BATCH} messages of {ALLOCATIONS.name} at once, each on another subject",
        )
    return Stream.ALLOCATIONS


def check_size(subject: str, body: bytes) -> None:
    """Raises BusRefused for more than NATS carries by default."""
    if len(body) > LARGEST_BODY:
        raise BusRefused(
            f"a message of {len(body)} bytes on {clean(subject, 200)} is more than {LARGEST_BODY}",
            "say less in one message",
        )


def takes(patterns: Collection[str], subject: str) -> bool:
    """Whether a subject fits one of the patterns."""
    return any(matches(pattern, subject) for pattern in patterns)


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits a pattern: `*` stands for one token, `>` at the end for one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


async def ensure(request: Request, replicas: int | None) -> list["Narrow"]:
    """
    Creates the stores that are missing and checks those that exist. Returns those that do not take every event.

    `replicas` is 1 or 3; None creates with 1 and takes what exists. Raises BusRefused that names the store, the field,
    what is expected, what was found, and the remedy; raises BusUnavailable if NATS cannot say.
    """
    narrow: list[Narrow] = []
    for store in STORES:
        wanted = msgspec.structs.replace(store, num_replicas=replicas or store.num_replicas)
        info = await stream_info(request, store.name)
        if info.error is not None and info.error.err_code == NOT_FOUND:
            created = await request(f"$JS.API.STREAM.CREATE.{store.name}", msgspec.json.encode(wanted))
            info = msgspec.json.decode(created, type=Info)
            if info.error is not None and info.error.code == 400:  # created by another, meanwhile and otherwise?
                found = await stream_info(request, store.name)
                info = info if found.error is not None and found.error.err_code == NOT_FOUND else found
        if info.error is not None:
            raise refused(f"store {store.name}", info.error)
        check(wanted, info.config, any_replicas=replicas is None)
        taken = subjects_in(info.config)
        if not {*wanted.subjects} <= {*taken}:
            narrow.append(Narrow(store=wanted, taken=taken))
    return narrow


async def stream_info(request: Request, name: str) -> Info:
    """The configuration and state of a stream, or the error of the server."""
    return msgspec.json.decode(await request(f"$JS.API.STREAM.INFO.{name}", b""), type=Info)


def check(wanted: Store, found: dict[str, object], any_replicas: bool) -> None:
    """Compares a store as it should be with one as it is. Raises BusRefused for the first difference."""
    expected: dict[str, object] = msgspec.to_builtins(wanted)
    ignored = {"name", "description", "metadata", *(["num_replicas"] if any_replicas else [])}
    metadata = found.get("metadata")
    tags = metadata if isinstance(metadata, dict) else {}
    pairs = [(field, expected[field], found.get(field)) for field in expected if field not in ignored]
    pairs += [(f"metadata[{name}]", value, tags.get(name)) for name, value in wanted.metadata.items()]
    for field, want, have in pairs:
        if field == "subjects" and is_of_another_version(wanted, subjects_in(found)):
            continue
        have = type(want)() if have is None else have  # NATS leaves out what is false, empty or 0
        if want != have and not (isinstance(want, (list, tuple)) and isinstance(have, list) and list(want) == have):
            raise BusRefused(
                f"store {wanted.name}: {field} is {clean(repr(have))}, expected {want!r}",
                f"set it with `nats stream edit {wanted.name}`, or move the store away with `nats stream backup` and "
                f"`nats stream rm {wanted.name}`: allocators announce everything live again",
            )


def subjects_in(config: dict[str, object]) -> tuple[str, ...]:
    """The subjects that a store takes, by its configuration as NATS has it."""
    subjects = config.get("subjects")
    return tuple(str(subject) for subject in subjects) if isinstance(subjects, list) else ()


def is_of_another_version(wanted: Store, taken: Collection[str]) -> bool:
    """Whether these are subjects of a store of facts as an older or a newer version makes it."""
    first = FIRST.get(wanted.name)
    return first is not None and {*first} <= {*taken} and all(OF_EVENTS.fullmatch(subject) for subject in taken)


def refused(what: str, refusal: Refusal) -> BusRefused | BusUnavailable:
    """NATS' answer as an error of ours: 503 without a full store is a cluster that is electing, and passes by itself."""
    text = clean(refusal.description or f"error {refusal.code}", 200)
    if refusal.code in (408, 503) and refusal.err_code != 10023:
        return BusUnavailable(f"{what}: NATS says {text!r} ({refusal.err_code})")
    if refusal.err_code in (10023, 10047, 10028):
        remedy = "give the server more room (`max_file_store`) or the store a smaller bound"
    elif refusal.err_code == SUBJECTS_OVERLAP:
        remedy = "another stream takes its subjects: find it with `nats stream ls`, and remove it or take them from it"
    else:
        remedy = "look up the NATS error code and check the account's JetStream limits and permissions"
    return BusRefused(f"{what}: NATS refuses: {text} ({refusal.err_code})", remedy)
