"""
Sends requests that change something, and reports the outcome if no answer arrives.

There are three outcomes. If an answer arrives, it is the result of the command, even if something fails after it. If no
service received the request, nothing has changed. Otherwise, the outcome is unknown: the error states what may have
changed, and the command that shows it.

A request to an allocator has a deadline, so that it has no effect after the client has timed out
(`core.model.requests.Deadline`). The client reads the allocator's clock first.
"""

from typing import Any, NamedTuple

import anyio
import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable, NobodyAnswers, Unavailable, Undecodable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AllocateRequest, ClockReading, Deadline, NodeRequest, ReleaseRequest
from topoalign.core.ports import Bus


class Effect(NamedTuple):
    """Describes in words what a request changes."""

    what: str
    """`the allocation for pod ml/train`."""
    settle: str
    """The commands that show whether it was done, and undo or complete it."""


class NodeSilent(Unavailable):
    """
    Raised when NATS is reachable, but a service of the node does not answer.

    Remedy: Give the name with `--node`, and check that the agent runs there.
    """

    def __init__(self, node: NodeName, finding: str, service: str, effect: Effect | None = None) -> None:
        undone = f"; {effect.what} was not requested" if effect is not None else ""
        super().__init__(
            f"the {service} of node {node} does not answer: {finding}{undone}",
            "give the node's name with --node, and check that `topoalign up` or `topoalign node` runs there",
        )


class OutcomeUnknown(Unavailable):
    """
    Raised when a request gets no answer, so that the change may have been made.

    Remedy: Run the command that the message names.
    """

    def __init__(self, effect: Effect, why: str) -> None:
        super().__init__(f"it is not known whether {effect.what} was done: {why}", effect.settle)


async def put(
    bus: Bus,
    node: NodeName,
    subject: str,
    request: object,
    service: str,
    kind: Any,
    effect: Effect | None,
    within: float,
) -> Any:
    """
    Sends a request to a service of the node, such as `allocator`. Returns the answer, of type `kind`. An allocator does
    not execute the request later than `within` seconds from now. Raises the service's error, NodeSilent if nothing was
    done, and OutcomeUnknown.
    """
    until = anyio.current_time() + within
    if effect is not None and isinstance(request, AllocateRequest | ReleaseRequest):
        try:
            deadline = await deadline_until(bus, node, until)
        except BusUnavailable as error:
            raise NodeSilent(node, error.finding, service, effect) from error
        request = msgspec.structs.replace(request, deadline=deadline)
    left = until - anyio.current_time()
    try:
        return wire.decode_answer(await bus.ask(subject, msgspec.json.encode(request), max(left, 0.0)), kind)
    except NobodyAnswers as error:
        raise NodeSilent(node, error.finding, service, effect) from error
    except BusUnavailable as error:
        if effect is None:
            raise NodeSilent(node, error.finding, service) from error
        raise OutcomeUnknown(effect, error.finding) from error
    except Undecodable as error:
        if effect is None:
            raise
        raise OutcomeUnknown(effect, error.finding) from error


async def deadline_until(bus: Bus, node: NodeName, until: float) -> Deadline:
    """Converts `until`, a time of this process, to a deadline at that time or slightly earlier. Raises Unavailable."""
    question = msgspec.json.encode(NodeRequest(node=node))
    body = await bus.ask(wire.admission_subject(node, "clock"), question, until - anyio.current_time())
    reading = wire.decode_answer(body, ClockReading)
    return Deadline(clock=reading.clock, at=reading.now + until - anyio.current_time())
