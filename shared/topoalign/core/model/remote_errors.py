"""What another service failed with: how it looks in an answer, and as this side's error."""

from collections.abc import Mapping

import msgspec

from topoalign.core.model.errors import BadRequest, NoFit, TopoalignError, Unavailable


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
    """Raised when the other service found that the request cannot be meant."""


class RemoteNoFit(RemoteFailure, NoFit):
    """Raised when the other service found that the request is sound, and does not fit the node as it is now."""


class RemoteUnavailable(RemoteFailure, Unavailable):
    """Raised when the other service could not answer."""


BY_FAULT: Mapping[str, type[RemoteFailure]] = {"request": RemoteBadRequest, "fit": RemoteNoFit}


def remote(failed: Failure) -> RemoteFailure:
    """Returns the error that stands for a failure here. An unknown fault counts as the service's."""
    return BY_FAULT.get(failed.fault, RemoteUnavailable)(failed)
