"""
Requests that change something, and the outcome when no answer comes.

There are three outcomes. If the answer came, it is the result of the command, whatever fails after it. If no service
received the request, nothing has changed. Otherwise the outcome is unknown: the error names what may have changed and the
command that shows it.

A request to an allocator carries a deadline, so that it has no effect after its asker has given up
(`core.model.requests.Deadline`). The asker reads the allocator's clock first.
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
    """Describes what a request changes, for people."""

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
    Raised when a request was sent and no answer came: it may have been done.

    Remedy: Run the command that the message names: it shows what was done.
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
    The answer of a service of the node (`allocator`) to a request, of type `kind`. An allocator does not carry it out later
    than `within` seconds from now. Raises the service's error, NodeSilent where nothing was done, and OutcomeUnknown.
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
    """The deadline that is this moment of ours or a little before. Raises Unavailable."""
    question = msgspec.json.encode(NodeRequest(node=node))
    body = await bus.ask(wire.admission_subject(node, "clock"), question, until - anyio.current_time())
    reading = wire.decode_answer(body, ClockReading)
    return Deadline(clock=reading.clock, at=reading.now + until - anyio.current_time())
