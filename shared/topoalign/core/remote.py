"""What another service failed with: how it looks in an answer, and as this side's error."""

import msgspec

from topoalign.core.errors import BadRequest, NoFit, TopoalignError, Unavailable


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="Failure"):
    """The answer to a question that could not be answered."""

    fault: str
    """Whose: `request`, `fit` or `service`."""
    code: str
    finding: str
    remedy: str


class RemoteFailure(TopoalignError):
    """A failure that another service answered with, as this side's error; `code` is the other side's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.finding, failure.remedy)
        self.failure = failure


class RemoteBadRequest(RemoteFailure, BadRequest):
    pass


class RemoteNoFit(RemoteFailure, NoFit):
    pass


class RemoteUnavailable(RemoteFailure, Unavailable):
    pass


def remote(failed: Failure) -> RemoteFailure:
    match failed.fault:
        case "request":
            return RemoteBadRequest(failed)
        case "fit":
            return RemoteNoFit(failed)
        case _:
            return RemoteUnavailable(failed)
