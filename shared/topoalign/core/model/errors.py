"""
Errors that topoalign raises on purpose.

An error takes data and writes its own message. Its base class shows who can fix it; each front end (gRPC, HTTP,
command line) maps the base classes once. `code` is a stable CamelCase word, `str(error)` the finding, `remedy` the
action to take.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec


class TopoalignError(Exception):
    """Base of every error raised on purpose: `code` is its kind, `finding` what was found, `remedy` what to do."""

    code: ClassVar[str] = "Internal"

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.finding = finding
        self.remedy = remedy


class BadRequest(TopoalignError):
    """Base of errors that the caller can fix: the request or the configuration is invalid. A retry fails again."""

    code = "BadRequest"


class NoFit(TopoalignError):
    """Base of errors without a fault: a valid request does not fit a working node in its present state."""

    code = "NoFit"


class Unavailable(TopoalignError):
    """Base of errors of the machine or of another service: hardware, driver, disk or bus failed. A later try may succeed."""

    code = "Unavailable"


class TooMuchWork(NoFit):
    """Raised when a search reaches its limit on work before it has the exact answer."""

    code = "TooMuchWork"


class InvalidField(BadRequest):
    """Raised for a wrong value in a request, setting or message; `field` is its path, such as `cpus[3].node`."""

    code = "InvalidField"

    def __init__(self, field: str, finding: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class SequenceGap(TopoalignError):
    """Raised when facts are missing between the last folded one and this one: ask the writer for a snapshot."""

    code = "SequenceGap"

    def __init__(self, node: str, epoch: int, have: int, got: int) -> None:
        self.node = node
        self.epoch = epoch
        self.have = have
        self.got = got
        super().__init__(
            f"node {node}, epoch {epoch}: fact {got} arrived after fact {have}",
            "a snapshot of the node's allocations heals it",
        )


class Contradiction(TopoalignError):
    """Raised for a fact that cannot be true after those before it, such as the owner of a released allocation."""

    code = "Contradiction"

    def __init__(self, node: str, finding: str) -> None:
        self.node = node
        super().__init__(f"node {node}: {finding}", "a snapshot of the node's allocations heals it; look at the writer")


class UnknownDevice(BadRequest):
    """Raised for the name of a device that this node does not have, or no longer has."""

    code = "UnknownDevice"

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        super().__init__(
            f"not devices of this node: {quoted(devices)}",
            "list the node's devices with `topoalign topo --wide` and use their ids as printed there",
        )


class DeviceUnusable(BadRequest):
    """Raised for the name of a device that is unhealthy, of unknown health, or cordoned."""

    code = "DeviceUnusable"

    def __init__(self, device: str, state: str, reason: str) -> None:
        self.device = device
        self.state = state
        super().__init__(
            f"device {quoted([device])} is {state}: {clean(reason, 200)}",
            "choose healthy devices; `topoalign doctor` and the node's log say what is wrong with this one",
        )


class PodAlreadyAllocated(BadRequest):
    """Raised when a pod of this name already holds devices, and not those that are asked for now."""

    code = "PodAlreadyAllocated"

    def __init__(self, pod: str) -> None:
        super().__init__(
            f"pod {quoted([pod])} already holds an allocation of other resources",
            "release it first, or ask under another pod name",
        )


class NotFound(BadRequest):
    """Raised for the name of something that does not exist: an allocation, a node, a machine of the catalogue."""

    code = "NotFound"

    def __init__(self, kind: str, name: str, remedy: str) -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"no {kind} named {quoted([name])}", remedy)


class InvalidMachine(BadRequest):
    """Raised when the description of a machine cannot be read; line and column, where known, count from 1."""

    code = "InvalidMachine"

    def __init__(self, finding: str, remedy: str, line: int | None = None, column: int | None = None) -> None:
        self.line = line
        self.column = column
        place = "" if line is None else f"line {line}: " if column is None else f"line {line}, column {column}: "
        super().__init__(place + finding, remedy)


class Undecodable(BadRequest):
    """Raised for a message or journal record that is not what it claims to be."""

    code = "Undecodable"

    def __init__(self, what: str, finding: str) -> None:
        super().__init__(f"{what} cannot be decoded: {finding}", "look at the writer; nothing of it was applied")


class KubeletOwnsDevices(BadRequest):
    """Raised for an allocation over the bus on a node whose devices the kubelet hands out: two owners would clash."""

    code = "KubeletOwnsDevices"

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the kubelet of node {node} hands out its devices",
            "create the pod, or delete it, in Kubernetes; `what-if` and `explain` work on every node",
        )


class DeviceInUse(NoFit):
    """Raised for the name of a device that a live allocation holds."""

    code = "DeviceInUse"

    def __init__(self, devices: Sequence[str], allocation: str) -> None:
        self.devices = tuple(devices)
        self.allocation = allocation
        super().__init__(
            f"{quoted(devices)} belong to allocation {allocation}, which is live",
            "release that allocation, or wait until its container has gone; `topoalign explain` names its owner",
        )


class BusUnavailable(Unavailable):
    """Raised when the bus does not confirm in time. It may have stored the message: publish it under the same id."""

    code = "BusUnavailable"

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "check that nats-server runs and is reachable; `topoalign doctor` tests it")


class NobodyAnswers(BusUnavailable):
    """Raised when nobody has subscribed to the subject: no such service, or no stream. Nobody got the message."""


class DeadlinePassed(Unavailable):
    """Raised for a request that arrives after its caller has stopped waiting. It had no effect."""

    code = "DeadlinePassed"

    def __init__(self, request: str, why: str) -> None:
        super().__init__(
            f"{clean(request, 600)} was refused: {why}", "nothing has changed; ask again if it is still wanted"
        )


class BusRefused(Unavailable):
    """Raised when the bus answers with a refusal: permissions, limits, an older server, a store with other settings."""

    code = "BusRefused"


class IdTaken(BusRefused):
    """Raised when the store may have another message under this message's id: the message was not stored."""

    code = "IdTaken"

    def __init__(self, name: str, finding: str) -> None:
        super().__init__(
            f"the id {clean(name, 200)!r} is taken: {finding}",
            "see who else may publish on the subjects of this service (docs/events.md, Permissions)",
        )


class BusConflict(Unavailable):
    """Raised when the newest message of a subject is not the expected one: nothing was stored. Read again, and decide."""

    code = "BusConflict"

    def __init__(self, subject: str, expected: int) -> None:
        super().__init__(
            f"{clean(subject, 200)} has a newer message than {expected}", "read the newest message and try again"
        )


class DriverFault(Unavailable):
    """Raised when the hardware or its driver library fails or does not answer in time."""

    code = "DriverFault"


class HardwareUnknown(Unavailable):
    """Raised when the hardware of the node has not been read, or not been received, yet."""

    code = "HardwareUnknown"

    def __init__(self, node: str, why: str) -> None:
        super().__init__(
            f"the hardware of node {node} is not known yet: {why}",
            "ask again in a moment; if it stays so, check that discovery runs, and read its log",
        )


class StateFault(Unavailable):
    """Raised when the state directory cannot be used: locked by another process, unreadable, full, or damaged."""

    code = "StateFault"


def quoted(texts: Sequence[str], most: int = 8, width: int = 80) -> str:
    """Formats foreign texts for people: `most` of them, `width` characters of each, no control characters."""
    shown = ", ".join(repr(clean(text[: width + 1], width)) for text in texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"


def clean(text: str, width: int = 80) -> str:
    """Returns one line of printable text: control and format characters become `?`, and what exceeds `width` is cut."""
    if len(text) <= width and text.isprintable():
        return text
    line = "".join(c if c.isprintable() else "?" for c in text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + "…"


# The failure of another service: its form in an answer, and the error that it becomes here.


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="Failure"):
    """The answer to a question that could not be answered: the error of the service as data."""

    fault: str
    """Whose: `request`, `fit` or `service`."""
    code: str
    finding: str
    remedy: str


class RemoteFailure(TopoalignError):
    """Raised for a failure that another service answered with; `failure` has the other side's code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.finding, failure.remedy)
        self.failure = failure


class RemoteBadRequest(RemoteFailure, BadRequest):
    """Raised when the other service found that the request is invalid."""


class RemoteNoFit(RemoteFailure, NoFit):
    """Raised when the other service found that the request is valid, and does not fit the node as it is now."""


class RemoteUnavailable(RemoteFailure, Unavailable):
    """Raised when the other service could not answer."""


BY_FAULT: Mapping[str, type[RemoteFailure]] = {"request": RemoteBadRequest, "fit": RemoteNoFit}


def remote(failed: Failure) -> RemoteFailure:
    """Returns the error that stands for a failure here. An unknown fault counts as the service's."""
    return BY_FAULT.get(failed.fault, RemoteUnavailable)(failed)
