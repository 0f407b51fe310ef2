"""
Errors that topoalign raises on purpose.

The constructor of an error takes data and formats the message. The base class shows who can fix the error; each front
end (gRPC, HTTP, command line) maps only the base classes. `code` is the name of the class and stable, `str(error)` is
the finding, and `remedy` is the action to take.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec


class TopoalignError(Exception):
    """
    Raised for an error without a code of its own.

    Remedy: Report it as a defect of topoalign.
    """

    code: ClassVar[str] = "Internal"

    def __init_subclass__(cls) -> None:
        """Sets `code` to the name of the class, unless the class defines `code`."""
        cls.code = vars(cls).get("code", cls.__name__)

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.finding = finding
        self.remedy = remedy


class BadRequest(TopoalignError):
    """
    Raised when the request or configuration is invalid, so a retry fails again. Base of errors that the caller can fix.

    Remedy: Correct what the message names.
    """


class NoFit(TopoalignError):
    """
    Raised when a valid request does not fit a working node at present. Base of refusals that are not failures.

    Remedy: Wait until resources are free, or request less.
    """


class Unavailable(TopoalignError):
    """
    Raised when hardware, driver, disk, bus or another service failed. Base of errors that can be temporary.

    Remedy: Try again, and read the log of the service.
    """


class TooMuchWork(NoFit):
    """
    Raised when a search reaches its limit on work before it finds the exact answer.

    Remedy: Request fewer kinds of resources, or fewer devices.
    """


class InvalidField(BadRequest):
    """
    Raised for an invalid value in a request, setting or message. `field` is its path, such as `cpus[3].node`.

    Remedy: Correct the field that the message names.
    """

    def __init__(self, field: str, finding: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class SequenceGap(TopoalignError):
    """
    Raised when facts are missing between the last folded one and this one.

    Remedy: Request a snapshot of the node's allocations; topoalign's own services do.
    """

    def __init__(self, node: str, epoch: int, have: int, got: int) -> None:
        self.node = node
        self.epoch = epoch
        self.have = have
        self.got = got
        super().__init__(
            f"node {node}, epoch {epoch}: fact {got} arrived after fact {have}",
            "request a snapshot of the node's allocations; topoalign's own services do",
        )


class Contradiction(TopoalignError):
    """
    Raised for a fact that contradicts those before it.

    Remedy: Request a snapshot, and look for a second publisher of the node.
    """

    def __init__(self, node: str, finding: str) -> None:
        self.node = node
        super().__init__(f"node {node}: {finding}", "request a snapshot, and look for a second publisher of the node")


class UnknownDevice(BadRequest):
    """
    Raised for a device id that the node does not have.

    Remedy: Use the ids that `topoalign topo --wide` prints.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        super().__init__(
            f"not devices of this node: {quoted(devices)}",
            "list the node's devices with `topoalign topo --wide` and use their ids as printed there",
        )


class DeviceUnusable(BadRequest):
    """
    Raised for a device that is unhealthy, of unknown health, or cordoned.

    Remedy: Choose healthy devices; `topoalign doctor` shows what is wrong with this one.
    """

    def __init__(self, device: str, state: str, reason: str) -> None:
        self.device = device
        self.state = state
        super().__init__(
            f"device {quoted([device])} is {state}: {clean(reason, 200)}",
            "choose healthy devices; `topoalign doctor` and the node's log show what is wrong with this one",
        )


class PodAlreadyAllocated(BadRequest):
    """
    Raised when a pod of this name already holds other resources.

    Remedy: Release it first, or use another name for the pod.
    """

    def __init__(self, pod: str) -> None:
        super().__init__(
            f"pod {quoted([pod])} already holds an allocation of other resources",
            "release it first, or use another name for the pod",
        )


class NotFound(BadRequest):
    """
    Raised for the name of an allocation, a node or a machine that does not exist.

    Remedy: Correct the name; the message says where to list them.
    """

    def __init__(self, kind: str, name: str, remedy: str) -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"no {kind} named {quoted([name])}", remedy)


class InvalidMachine(BadRequest):
    """
    Raised when the description of a machine cannot be read. Line and column count from 1. None: unknown.

    Remedy: Correct that line, or describe the machine in another form.
    """

    def __init__(self, finding: str, remedy: str, line: int | None = None, column: int | None = None) -> None:
        self.line = line
        self.column = column
        place = "" if line is None else f"line {line}: " if column is None else f"line {line}, column {column}: "
        super().__init__(place + finding, remedy)


class Undecodable(BadRequest):
    """
    Raised for a message or journal entry that cannot be decoded, or does not match its checksum.

    Remedy: Check what wrote it; nothing of it was applied.
    """

    def __init__(self, what: str, finding: str) -> None:
        super().__init__(f"{what} cannot be decoded: {finding}", "check what wrote it; nothing of it was applied")


class KubeletOwnsDevices(BadRequest):
    """
    Raised for an allocation over the bus on a node whose kubelet allocates the devices.

    Remedy: Create or delete the pod in Kubernetes; `what-if` and `explain` work everywhere.
    """

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the kubelet of node {node} allocates its devices",
            "create or delete the pod in Kubernetes; `what-if` and `explain` work on every node",
        )


class DeviceInUse(NoFit):
    """
    Raised for a device that a live allocation holds.

    Remedy: Wait until its container ends, or release the allocation; `topoalign explain` names the owner.
    """

    def __init__(self, devices: Sequence[str], allocation: str) -> None:
        self.devices = tuple(devices)
        self.allocation = allocation
        super().__init__(
            f"{quoted(devices)} belong to the live allocation {allocation}",
            "wait until its container ends, or release the allocation; `topoalign explain` names the owner",
        )


class BusUnavailable(Unavailable):
    """
    Raised when the bus does not confirm a message in time. It may be stored: publish it again under the same id.

    Remedy: Check that nats-server runs and is reachable; `topoalign doctor` tests it.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "check that nats-server runs and is reachable; `topoalign doctor` tests it")


class NobodyAnswers(BusUnavailable):
    """Raised when no service and no stream has subscribed to the subject, so that the message was not received."""

    code = BusUnavailable.code


class DeadlinePassed(Unavailable):
    """
    Raised for a request that arrives after the deadline of its caller. It had no effect.

    Remedy: Send it again if it is still wanted.
    """

    def __init__(self, request: str, why: str) -> None:
        super().__init__(
            f"{clean(request, 600)} was refused: {why}", "nothing has changed; send it again if it is still wanted"
        )


class BusRefused(Unavailable):
    """
    Raised when NATS refuses a request or a connection.

    Remedy: Correct what the message names: permission, limit, version or store.
    """


class IdTaken(BusRefused):
    """
    Raised when a message was not stored because the store may have another message under its id.

    Remedy: Find out who else publishes on these subjects.
    """

    def __init__(self, name: str, finding: str) -> None:
        super().__init__(
            f"the id {clean(name, 200)!r} is taken: {finding}",
            "find out who else may publish on the subjects of this service (docs/events.md, Permissions)",
        )


class BusConflict(Unavailable):
    """
    Raised when nothing was stored because the newest message of the subject is not the expected one.

    Remedy: Read the newest message and decide again.
    """

    def __init__(self, subject: str, expected: int) -> None:
        super().__init__(
            f"{clean(subject, 200)} has a newer message than {expected}", "read the newest message and try again"
        )


class DriverFault(Unavailable):
    """
    Raised when the hardware or its driver library fails or does not answer in time.

    Remedy: Look at `nvidia-smi` and the kernel log; the driver is tried again.
    """


class HardwareUnknown(Unavailable):
    """
    Raised when the hardware of the node has not been read or received yet.

    Remedy: Wait a moment. If the error persists, read the log of discovery.
    """

    def __init__(self, node: str, why: str) -> None:
        super().__init__(
            f"the hardware of node {node} is not known yet: {why}",
            "wait a moment; if it stays so, check that discovery runs, and read its log",
        )


class StateFault(Unavailable):
    """
    Raised when the state directory cannot be used: locked by another process, unreadable, full, or damaged.

    Remedy: Correct the directory as the message says, or set `TOPOALIGN_STATE_DIR`.
    """


def quoted(texts: Sequence[str], most: int = 8, width: int = 80) -> str:
    """
    Formats untrusted texts for messages: at most `most` texts of up to `width` characters, without control characters.
    """
    shown = ", ".join(repr(clean(text[: width + 1], width)) for text in texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"


def clean(text: str, width: int = 80) -> str:
    """Returns one printable line, truncated to `width` characters. Control and format characters become `?`."""
    if len(text) <= width and text.isprintable():
        return text
    line = "".join(c if c.isprintable() else "?" for c in text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + "…"


# Failures of other services: their form in an answer, and the errors that are raised for them.


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="Failure"):
    """The answer to a request that failed: the error of the service as data."""

    fault: str
    """The kind of the error: `request`, `fit` or `service`."""
    code: str
    finding: str
    remedy: str


class RemoteFailure(TopoalignError):
    """Raised when another service answers with a failure; `failure` has its code."""

    code = TopoalignError.code

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.finding, failure.remedy)
        self.failure = failure


class RemoteBadRequest(RemoteFailure, BadRequest):
    """Raised when the other service found that the request is invalid."""

    code = BadRequest.code


class RemoteNoFit(RemoteFailure, NoFit):
    """Raised when the other service found that a valid request does not fit the present state of the node."""

    code = NoFit.code


class RemoteUnavailable(RemoteFailure, Unavailable):
    """Raised when the other service could not answer."""

    code = Unavailable.code


BY_FAULT: Mapping[str, type[RemoteFailure]] = {"request": RemoteBadRequest, "fit": RemoteNoFit}


def remote(failed: Failure) -> RemoteFailure:
    """Returns the error to raise for a failure. An unknown `fault` counts as `service`."""
    return BY_FAULT.get(failed.fault, RemoteUnavailable)(failed)
