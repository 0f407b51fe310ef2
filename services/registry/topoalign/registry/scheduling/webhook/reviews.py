"""
AdmissionReview v1 of Kubernetes: the API server's request about a pod, and the response.

Created pods are checked completely. A pod that is updated, also through its subresource `status`, is checked again if
an annotation of topoalign differs, by what it asks for: the rest was checked before, and hardly any of it may change. A
Binding must have no annotation of topoalign: the API server copies its annotations to the pod.
"""

import base64

import msgspec
import structlog
from starlette.routing import BaseRoute

from topoalign.core.model.errors import BadRequest, NoFit, TopoalignError, Unavailable, Undecodable, clean
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.core.sharing.quota_amounts import OverQuota
from topoalign.registry.scheduling.extender.handlers import BODY_SECONDS, Call, call_route
from topoalign.registry.scheduling.webhook.pod_review import (
    Check,
    Forbidden,
    JsonPatch,
    LeftOut,
    Offered,
    ReviewedPod,
    Warn,
    annotations_of,
    changes_to,
    check_binding,
    check_update,
    names_another,
    no_warnings,
    nothing_left_out,
    paths_in_limits,
)

LARGEST_REVIEW = 3 * 1024 * 1024
"""Bytes: a pod before and after an update, of 1.5 MiB each at most."""
BINDINGS = (("pods", "binding"), ("bindings", ""))
"""Resource and subresource of what is created to bind a pod; the second is the older form of the first."""
API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"

log = structlog.get_logger("topoalign.registry.webhook")


class UserInfo(msgspec.Struct, frozen=True):
    """Who asks for the change."""

    groups: list[str] | None = None


class Resource(msgspec.Struct, frozen=True):
    """What is changed."""

    group: str = ""
    resource: str = ""


class ReviewRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A question."""

    uid: str
    operation: str = ""
    namespace: str = ""
    resource: Resource = Resource()
    sub_resource: str = ""
    user_info: UserInfo = UserInfo()
    object: ReviewedPod | None = None
    """Of a Binding, its metadata."""
    old_object: ReviewedPod | None = None


class Review(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the API server sends."""

    api_version: str
    kind: str
    request: ReviewRequest


class DenialStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why it is denied."""

    code: int
    message: str
    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An answer."""

    uid: str
    allowed: bool
    status: DenialStatus | None = None
    patch: str | None = None
    patch_type: str | None = None
    warnings: tuple[str, ...] | None = None
    """What the client shows to whoever created the pod."""


class ReviewAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the API server reads."""

    api_version: str = API_VERSION
    kind: str = KIND
    response: Response


class Webhook:
    """
    Checks pods; `scheduler`: the name of topoalign's, empty if none is required; `check`, `left_out`: as of `changes_to`;
    `check_updated`: as `check`, of a pod that is there already; `warn`: what of a new pod probably means something else.
    """

    def __init__(
        self,
        scheduler: str,
        offered: Offered,
        check: Check = check_pod,
        left_out: LeftOut = nothing_left_out,
        *,
        check_updated: Check = check_pod,
        warn: Warn = no_warnings,
        seconds: float = BODY_SECONDS,
    ) -> None:
        self._scheduler = scheduler
        self._offered = offered
        self._seconds = seconds
        self._check = check
        self._left_out = left_out
        self._check_updated = check_updated
        self._warn = warn

    def routes(self) -> list[BaseRoute]:
        """`/webhook` for the mutating configuration, `/webhook/validate` for the validating one, which takes no changes."""
        calls: dict[str, Call] = {
            "/webhook": self.mutate,
            "/webhook/validate": self.validate,
        }
        return [call_route(path, call, LARGEST_REVIEW, self._seconds) for path, call in calls.items()]

    async def mutate(self, body: bytes) -> bytes:
        """Whether the pod is allowed, and what is filled in of it."""
        return self._answer(body, mutating=True)

    async def validate(self, body: bytes) -> bytes:
        """Whether the pod is allowed as it is now. What it leaves out of slots is not asked for: it can be meant without."""
        return self._answer(body, mutating=False)

    def _answer(self, body: bytes, *, mutating: bool) -> bytes:
        asked = read_review(body)
        try:
            changes = self._judge(asked, self._left_out if mutating else nothing_left_out)
            if changes and not mutating:
                change = changes[0]
                raise Forbidden(change.field, f"is not {clean(str(change.value))}", "leave it to the mutating webhook")
        except (BadRequest, NoFit, Unavailable) as error:
            log.info("pod denied", namespace=asked.namespace, code=error.code, finding=error.finding)
            return denied(asked.uid, error)
        return allow_pod(asked.uid, changes, self._warnings(asked))

    def _judge(self, asked: ReviewRequest, left_out: LeftOut) -> list[JsonPatch]:
        resource = asked.resource.resource
        if asked.resource.group or asked.object is None:
            return []
        if (resource, asked.sub_resource) in BINDINGS:
            check_binding(asked.object)
            return []
        if resource != "pods":
            return []
        if asked.operation != "CREATE" or asked.sub_resource:
            check_update(
                asked.object, asked.old_object, asked.namespace, self._scheduler, self._offered, self._check_updated
            )
            return []
        groups = frozenset(asked.user_info.groups or ())
        return changes_to(asked.object, asked.namespace, groups, self._scheduler, self._offered, self._check, left_out)

    def _warnings(self, asked: ReviewRequest) -> tuple[str, ...]:
        """Those about a pod that is created. The API server shows each text once, whichever webhook returns it."""
        pod = asked.object
        if (asked.resource.group, asked.resource.resource, asked.sub_resource) != ("", "pods", "") or pod is None:
            return ()
        if asked.operation != "CREATE" or pod.spec is None or names_another(pod.spec, self._scheduler):
            return ()
        return self._warn(annotations_of(pod), paths_in_limits(pod.spec))


def read_review(body: bytes) -> ReviewRequest:
    """The question. Raises Undecodable."""
    try:
        review = msgspec.json.decode(body, type=Review)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable("the review", clean(str(error), 200)) from error
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise Undecodable("the review", f"not an {KIND} of {API_VERSION}")
    return review.request


def allow_pod(uid: str, changes: list[JsonPatch], warnings: tuple[str, ...] = ()) -> bytes:
    """The answer that allows the pod, with these changes and warnings."""
    response = Response(uid=uid, allowed=True, warnings=warnings or None)
    if changes:
        patch = base64.b64encode(msgspec.json.encode(changes)).decode()
        response = msgspec.structs.replace(response, patch=patch, patch_type="JSONPatch")
    return encode_review(response)


def denied(uid: str, error: TopoalignError) -> bytes:
    """The answer that denies the pod."""
    code, reason = (403, "Forbidden") if isinstance(error, Forbidden | OverQuota) else (422, "Invalid")
    if isinstance(error, Unavailable):
        code = 503
        reason = "ServiceUnavailable"
    message = f"topoalign: {clean(error.finding, 1000)}; {clean(error.remedy, 1000)}"
    return encode_review(
        Response(uid=uid, allowed=False, status=DenialStatus(code=code, message=message, reason=reason))
    )


def encode_review(response: Response) -> bytes:
    """The answer as JSON."""
    return msgspec.json.encode(ReviewAnswer(response=response))
