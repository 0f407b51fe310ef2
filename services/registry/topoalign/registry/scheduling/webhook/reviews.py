"""
Answers AdmissionReview v1 of Kubernetes: checks pods, and sets fields that they leave out. It denies:

    any pod             annotations in `topoalign.io/` that users do not write: a reader could take them for topoalign's
    any Binding         annotations in `topoalign.io/`: the API server copies them to the pod
    pods that request   `spec.nodeName`, a privileged container, another scheduler: these bypass the decision;
    devices of ours     invalid requests and annotations, which no node would ever admit

A pod that requests GPUs by Koordinator's annotations and resource names also counts as a request for our devices,
unless it names another scheduler. A kubelet ignores these names, so its containers would otherwise start without a GPU.

A pod without `schedulerName` gets ours, if one is configured. A container that requests slots of GPUs gets the amounts
that it leaves out (`core.sharing.slot_defaults`), and is checked with them. No label or annotation exempts a pod,
because anyone who creates a pod can set them. Namespaces are exempted in the webhook's configuration.

A new pod is checked completely. An updated pod, also one whose subresource `status` is updated, is checked again only
if an annotation of topoalign differs, because the other checks were done when it was created. The API server calls
twice: the mutating webhook can change the pod, and the validating one sees it with the changes of other webhooks.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import structlog
from starlette.routing import BaseRoute

from topoalign.core.demand.gangs import annotation_path
from topoalign.core.deviceshare.demand import OF_USERS, OWN_DOMAIN, is_joint
from topoalign.core.deviceshare.koordinator_names import GPU_RESOURCES
from topoalign.core.model.errors import BadRequest, NoFit, TopoalignError, Unavailable, Undecodable, clean, quoted
from topoalign.core.model.ids import GPU, NIC, Namespace, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.core.sharing.quota_amounts import OverQuota
from topoalign.core.sharing.slot_defaults import FilledIn, with_defaults
from topoalign.kubelet.files import manifest
from topoalign.registry.ports import DEFAULT_SCHEDULER
from topoalign.registry.scheduling.extender.handlers import BODY_SECONDS, Call, call_route
from topoalign.registry.scheduling.scheduling_api import with_relevant_annotations

LARGEST_REVIEW = 3 * 1024 * 1024
"""Bytes: a pod before and after an update, of 1.5 MiB each at most."""
BINDINGS = (("pods", "binding"), ("bindings", ""))
"""Resource and subresource of the objects that bind a pod; the second is the older form of the first."""
API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod, which represents a static pod that already runs on its kubelet."""
NODES = "system:nodes"
"""The group of kubelets."""

log = structlog.get_logger("topoalign.registry.webhook")


class Forbidden(BadRequest):
    """
    Raised for a field that no pod may have when it is created.

    `field` is its path.

    Remedy: Remove the field from the manifest.
    """

    def __init__(self, field: str, finding: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class SecurityContext(msgspec.Struct, frozen=True):
    """The checked fields of a container's security context."""

    privileged: bool | None = None


class EnvVariable(msgspec.Struct, frozen=True):
    """The checked fields of an environment variable."""

    name: str = ""


class ReviewedContainer(manifest.ManifestContainer, frozen=True, rename="camel"):
    """The checked fields of a container."""

    env: list[EnvVariable] | None = None
    security_context: SecurityContext | None = None


class ReviewedSpec(manifest.ManifestSpec, frozen=True, kw_only=True, rename="camel"):
    """The checked fields of a pod's `spec`."""

    containers: list[ReviewedContainer] | None = None  # type: ignore[assignment]  # of more fields
    init_containers: list[ReviewedContainer] | None = None  # type: ignore[assignment]  # of more fields
    node_name: str | None = None

    def list_containers(self) -> Iterator[tuple[str, ReviewedContainer]]:
        """Yields each container with its path: `spec.containers[0]`."""
        for group, containers in (("initContainers", self.init_containers), ("containers", self.containers)):
            for position, container in enumerate(containers or ()):
                yield f"spec.{group}[{position}]", container


class ReviewedPod(manifest.PodManifest, frozen=True, kw_only=True, rename="camel"):
    """The checked fields of a pod."""

    spec: ReviewedSpec | None = None


class UserInfo(msgspec.Struct, frozen=True):
    """Who requests the change."""

    groups: list[str] | None = None


class Resource(msgspec.Struct, frozen=True):
    """The resource that is changed."""

    group: str = ""
    resource: str = ""


class ReviewRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The request in a review."""

    uid: str
    operation: str = ""
    namespace: str = ""
    resource: Resource = Resource()
    sub_resource: str = ""
    user_info: UserInfo = UserInfo()
    object: ReviewedPod | None = None
    """The pod. Of a Binding, only the metadata is decoded."""
    old_object: ReviewedPod | None = None


class Review(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The message of the API server."""

    api_version: str
    kind: str
    request: ReviewRequest


class JsonPatch(msgspec.Struct, frozen=True, kw_only=True):
    """A change to the pod: an operation of JSON Patch (RFC 6902)."""

    op: str = "add"
    path: str
    value: object


class Webhook:
    """Checks pods for one cluster."""

    def __init__(
        self,
        scheduler: str,
        offered: Callable[[ResourceName], bool],
        check: Callable[[PodRequest], object] = check_pod,
        left_out: Callable[[PodRequest], Sequence[FilledIn]] = lambda pod: (),
        *,
        check_updated: Callable[[PodRequest], object] = check_pod,
        warn: Callable[[Mapping[str, str], Mapping[ResourceName, str]], tuple[str, ...]] = lambda notes, limits: (),
    ) -> None:
        """
        `scheduler`: the name of topoalign's scheduler; empty if none is required. `offered`: whether any node offers a
        resource. `check` raises an error for a new pod that the cluster cannot run, and `check_updated` for an existing
        one. `left_out`: the amounts that a pod with slots of GPUs leaves out. `warn` returns the probable mistakes of a
        new pod, from its annotations and the paths of its limits.
        """
        self._scheduler = scheduler
        self._offered = offered
        self._check = check
        self._left_out = left_out
        self._check_updated = check_updated
        self._warn = warn

    def routes(self) -> list[BaseRoute]:
        """`/webhook` for the mutating configuration, and `/webhook/validate` (no changes) for the validating one."""
        calls: dict[str, Call] = {"/webhook": self.mutate, "/webhook/validate": self.validate}
        return [call_route(path, call, LARGEST_REVIEW, BODY_SECONDS) for path, call in calls.items()]

    async def mutate(self, body: bytes) -> bytes:
        """Answers whether the pod is allowed, with the changes to it."""
        return self._answer(body, mutating=True)

    async def validate(self, body: bytes) -> bytes:
        """Answers whether the pod is allowed as it is now. Amounts that it leaves out are no reason to deny it."""
        return self._answer(body, mutating=False)

    def _answer(self, body: bytes, *, mutating: bool) -> bytes:
        try:
            review = msgspec.json.decode(body, type=Review)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable("the review", clean(str(error), 200)) from error
        if (review.api_version, review.kind) != (API_VERSION, KIND):
            raise Undecodable("the review", f"not an {KIND} of {API_VERSION}")
        asked = review.request
        try:
            changes = self._judge(asked, mutating=mutating)
        except (BadRequest, NoFit, Unavailable) as error:
            log.info("pod denied", namespace=asked.namespace, code=error.code, finding=error.finding)
            return review_answer(asked.uid, allowed=False, status=denial_status(error))
        # The API server shows each warning once, whichever webhook returns it.
        response: dict[str, object] = {"warnings": warnings} if (warnings := self._warnings(asked)) else {}
        if changes:
            patch = base64.b64encode(msgspec.json.encode(changes)).decode()
            response |= {"patch": patch, "patchType": "JSONPatch"}
        return review_answer(asked.uid, allowed=True, **response)

    def _judge(self, asked: ReviewRequest, *, mutating: bool) -> list[JsonPatch]:
        """Returns the changes to a pod. Raises Forbidden, InvalidField and the errors of the checks to deny it."""
        pod = asked.object
        resource = asked.resource.resource
        if asked.resource.group or pod is None:
            return []
        if (resource, asked.sub_resource) in BINDINGS:
            for key in sorted(own_annotations(annotations_of(pod))):
                where = annotation_path(clean(key))
                raise Forbidden(where, "is not for a Binding to set", "write it when the pod is created")
            return []
        if resource != "pods":
            return []
        if asked.operation == "CREATE" and not asked.sub_resource:
            return self._judge_new(pod, asked, mutating=mutating)
        new = annotations_of(pod)
        old = annotations_of(asked.old_object)
        check_own_annotations(new, old)
        if own_annotations(new) != own_annotations(old) and self._requests_ours(pod):
            self._check_updated(reviewed_request(pod, asked.namespace))
        return []

    def _judge_new(self, pod: ReviewedPod, asked: ReviewRequest, *, mutating: bool) -> list[JsonPatch]:
        check_own_annotations(annotations_of(pod), {})
        if pod.spec is None or not self._requests_ours(pod):
            return []
        if NODES in (asked.user_info.groups or ()) and MIRROR in annotations_of(pod):
            return []
        check_no_bypass(pod.spec)
        request = reviewed_request(pod, asked.namespace)
        filled = self._left_out(request) if mutating else ()
        self._check(with_defaults(request, filled) if filled else request)
        changes = [change for each in filled for change in changes_of(each, pod.spec)]
        if not self._scheduler or pod.spec.scheduler_name == self._scheduler:
            return changes
        if pod.spec.scheduler_name in (None, "", DEFAULT_SCHEDULER):
            if not mutating:
                raise Forbidden("spec.schedulerName", f"is not {self._scheduler}", "leave it to the mutating webhook")
            return [JsonPatch(path="/spec/schedulerName", value=self._scheduler), *changes]
        finding = f"{quoted([pod.spec.scheduler_name])} does not know which devices fit together"
        raise Forbidden("spec.schedulerName", finding, f"leave it out, or name {self._scheduler}")

    def _requests_ours(self, pod: ReviewedPod) -> bool:
        if pod.spec is None:
            return False
        names = [
            ResourceName(name)
            for _, container in pod.spec.list_containers()
            if container.resources is not None
            for amounts in (container.resources.limits, container.resources.requests)
            for name in amounts or ()
        ]
        for name in names:
            if name in (GPU, NIC) or name.startswith(OWN_DOMAIN) or ("/" in name and self._offered(name)):
                return True
        # A pod that requests GPUs by Koordinator's names; Koordinator's own pods name its scheduler.
        return (
            is_joint(annotations_of(pod))
            and pod.spec.scheduler_name in (None, "", DEFAULT_SCHEDULER, self._scheduler)
            and any(name in GPU_RESOURCES for name in names)
        )

    def _warnings(self, asked: ReviewRequest) -> tuple[str, ...]:
        """The warnings about a pod that is created for our scheduler."""
        pod = asked.object
        if (asked.resource.group, asked.resource.resource, asked.sub_resource) != ("", "pods", "") or pod is None:
            return ()
        if asked.operation != "CREATE" or pod.spec is None:
            return ()
        if self._scheduler and pod.spec.scheduler_name not in (None, "", DEFAULT_SCHEDULER, self._scheduler):
            return ()
        paths = {
            ResourceName(name): where
            for where, container in pod.spec.list_containers()
            if container.resources is not None
            for name in container.resources.limits or ()
        }
        return self._warn(annotations_of(pod), paths)


def check_own_annotations(new: Mapping[str, str], old: Mapping[str, str]) -> None:
    """Raises Forbidden for a new or changed annotation of topoalign that users do not write."""
    for key in sorted(new):
        if key.startswith(OWN_DOMAIN) and key not in OF_USERS and new[key] != old.get(key):
            raise Forbidden(
                annotation_path(clean(key)),
                "is not for users to write",
                f"leave it out; users write {', '.join(OF_USERS)}",
            )


def check_no_bypass(spec: ReviewedSpec) -> None:
    """Raises Forbidden for a pod that would get devices without the scheduler, or all devices of its node."""
    if spec.node_name:
        raise Forbidden("spec.nodeName", "the pod would not pass the scheduler", "use a nodeSelector or affinity")
    for where, container in spec.list_containers():
        if container.security_context is not None and container.security_context.privileged:
            field = f"{where}.securityContext.privileged"
            raise Forbidden(
                field, "a privileged container has all devices of its node", "add the capabilities it needs"
            )


def reviewed_request(pod: ReviewedPod, namespace: str) -> PodRequest:
    """The request of the pod. Raises InvalidField for amounts that cannot be read."""
    request = with_relevant_annotations(manifest.request_from_pod(pod))
    return msgspec.structs.replace(request, namespace=Namespace(namespace) if namespace else request.namespace)


def changes_of(filled: FilledIn, spec: ReviewedSpec) -> Iterator[JsonPatch]:
    """Yields the changes to one container. An environment variable that the container already has is not changed."""
    at = "/" + filled.where.replace(".", "/").replace("[", "/").removesuffix("]")
    for name, amount in filled.limits.items():
        yield JsonPatch(path=f"{at}/resources/limits/{name.replace('~', '~0').replace('/', '~1')}", value=str(amount))
    env = list(dict(spec.list_containers())[filled.where].env or ())
    for variable in ({"name": name, "value": value} for name, value in filled.environment.items()):
        if not env:
            yield JsonPatch(path=f"{at}/env", value=[variable])
        elif all(each.name != variable["name"] for each in env):
            yield JsonPatch(path=f"{at}/env/-", value=variable)


def own_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """The annotations in `topoalign.io/`."""
    return {key: value for key, value in annotations.items() if key.startswith(OWN_DOMAIN)}


def annotations_of(pod: ReviewedPod | None) -> Mapping[str, str]:
    """The annotations of the pod, with an empty text for null."""
    annotations = pod.metadata.annotations if pod is not None and pod.metadata is not None else None
    return {key: value or "" for key, value in (annotations or {}).items()}


def review_answer(uid: str, *, allowed: bool, **response: object) -> bytes:
    """The message to the API server with the response to the request of this UID."""
    return msgspec.json.encode(
        {"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": uid, "allowed": allowed, **response}}
    )


def denial_status(error: TopoalignError) -> dict[str, object]:
    """The `status` of a denial: HTTP code, message and reason."""
    code, reason = (403, "Forbidden") if isinstance(error, Forbidden | OverQuota) else (422, "Invalid")
    if isinstance(error, Unavailable):
        code = 503
        reason = "ServiceUnavailable"
    message = f"topoalign: {clean(error.finding, 1000)}; {clean(error.remedy, 1000)}"
    return {"code": code, "message": message, "reason": reason}
