"""The type that a subscriber receives for each event."""

import hashlib
from datetime import datetime

import msgspec

from topoalign.core.model.events import AllocationsSnapshot, Event, UsageObserved
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """An event, as a subscriber gets it."""

    event: Event
    position: int
    """Its place in the stream, to go on after: `since=position`. Of a snapshot made up at the start: where it stands."""
    time: float | None
    """Wall seconds at which it became true, as its writer says; None if it does not."""
    body: bytes = b""
    """
    The event in JSON as its writer said it, with what only a later version knows; of a snapshot made up, in ours. Empty of
    what a client without `bodies` has read.
    """
    left_out: bytes = b""
    """SHA-256 of a `UsageObserved` as it was, of which a client without `usage` has left out the contents; else empty."""
    state: NodeState | None = None
    """What is known of the node's allocations after this event, and nothing else of it; None for hardware and usage."""
    anew: bool = False
    """
    Forget what was heard of the node's allocations, its epoch and seq: this event is a snapshot and replaces them, also
    where its epoch or seq is not greater. So it is where the node's allocator does not stand by what was heard before.
    """


def made_up(snapshot: AllocationsSnapshot, state: NodeState, position: int, time: float) -> Heard:
    """What nobody has said: the allocations of a node as they are at this position."""
    body = msgspec.json.encode(snapshot)
    return Heard(event=snapshot, position=position, time=time, body=body, state=state, anew=True)


def abridged(usage: UsageObserved) -> tuple[UsageObserved, bytes]:
    """A reading that tells repetitions from news and says nothing else, and the SHA-256 of the whole one."""
    whole = hashlib.sha256(msgspec.json.encode(usage)).digest()
    return msgspec.structs.replace(usage, containers=(), containers_known=False, kubelet=None, exceeding=()), whole


def time_of(message: Message) -> float | None:
    """When the event became true, in wall seconds; None where the header does not say."""
    try:
        return datetime.fromisoformat(message.headers.get("ce-time", "")).timestamp()
    except ValueError:
        return None
