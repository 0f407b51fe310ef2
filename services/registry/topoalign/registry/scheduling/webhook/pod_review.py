"""
Checks a pod when it is created or when its annotations of topoalign change, and fills in what it leaves out.

    any pod             annotations in `topoalign.io/` that users do not write: who reads them could take them for ours
    any Binding         annotations in `topoalign.io/`
    pods that ask for   a node of their own choice, a privileged container, another scheduler: each gets devices past the
    devices of ours     decision; requests and annotations that cannot be meant, which no node would ever admit

Pods with Koordinator's annotations that ask for GPUs by its names count as such, unless they name another scheduler: a
kubelet passes these names over, and the containers would start without a GPU.

A pod without a scheduler's name gets ours, where one is set. What a container leaves out that asks for slots of GPUs is
filled in (`core.sharing.slot_defaults`), and then judged. No label or annotation exempts a pod: whoever may create one
may write these. Namespaces are exempted in the webhook's configuration.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from topoalign.core.demand.gangs import annotation_path
from topoalign.core.deviceshare.demand import OF_USERS, OWN_DOMAIN, is_joint
from topoalign.core.deviceshare.koordinator_names import GPU_RESOURCES
from topoalign.core.model.errors import BadRequest, clean, quoted
from topoalign.core.model.ids import GPU, NIC, Namespace, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.core.sharing.slot_defaults import FilledIn, with_defaults
from topoalign.kubelet.files import manifest
from topoalign.registry.scheduling.scheduling_api import with_counting

DEFAULT_SCHEDULER = "default-scheduler"
MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a pod by which a kubelet shows one of its static pods: it runs already."""
NODES = "system:nodes"
"""The group of kubelets."""

PLACE = re.compile(r"spec\.(\w+)\[(\d+)\]")
POSITION = re.compile(r"\.(\d+)(?=\.|$)")

Offered = Callable[[ResourceName], bool]
"""Whether some node offers this resource."""
LeftOut = Callable[[PodRequest], Sequence[FilledIn]]
"""What a pod that asks for slots of GPUs leaves out."""
Check = Callable[[PodRequest], object]
"""Raises an error for a pod that the cluster cannot run."""
Warn = Callable[[Mapping[str, str], Mapping[ResourceName, str]], tuple[str, ...]]
"""What of a pod probably means something else, by its annotations and limits (`core.sharing.pod_warnings`)."""


class Forbidden(BadRequest):
    """
    Raised for a field that no pod may have when it is created.

    `field` is its path.

    Remedy: Remove the field from the manifest.
    """

    code = "Forbidden"

    def __init__(self, field: str, finding: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class SecurityContext(msgspec.Struct, frozen=True):
    """The fields of a container's security context that are checked."""

    privileged: bool | None = None


class EnvVariable(msgspec.Struct, frozen=True):
    """The fields of an environment variable that are checked."""

    name: str = ""


class ReviewedContainer(manifest.ManifestContainer, frozen=True, rename="camel"):
    """The fields of a container that are checked."""

    env: list[EnvVariable] | None = None
    security_context: SecurityContext | None = None


class ReviewedSpec(manifest.ManifestSpec, frozen=True, kw_only=True, rename="camel"):
    """The fields of a pod's `spec` that are checked."""

    containers: list[ReviewedContainer] | None = None  # type: ignore[assignment]  # of more fields
    init_containers: list[ReviewedContainer] | None = None  # type: ignore[assignment]  # of more fields
    node_name: str | None = None


class ReviewedPod(manifest.PodManifest, frozen=True, kw_only=True, rename="camel"):
    """The fields of a pod that are checked."""

    spec: ReviewedSpec | None = None


class JsonPatch(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the pod, as JSON Patch (RFC 6902) has it."""

    op: str = "add"
    path: str
    value: object

    @property
    def field(self) -> str:
        """The path as errors have it: `spec.containers[0].resources.limits[nvidia.com/gpucores]`."""
        path = POSITION.sub(r"[\1]", self.path[1:].replace("/", "."))
        before, limits, name = path.partition(".limits.")
        return f"{before}.limits[{name.replace('~1', '/')}]" if limits else path


def nothing_left_out(pod: PodRequest) -> Sequence[FilledIn]:
    """No node offers slots."""
    return ()


def no_warnings(annotations: Mapping[str, str], limits: Mapping[ResourceName, str]) -> tuple[str, ...]:
    """Nothing is wrong with any pod."""
    return ()


def changes_to(
    pod: ReviewedPod,
    namespace: str,
    groups: frozenset[str],
    scheduler: str,
    offered: Offered,
    check: Check = check_pod,
    left_out: LeftOut = nothing_left_out,
) -> list[JsonPatch]:
    """
    What is filled in of a new pod. `groups`: those of who creates it; `scheduler`: the name of ours, or empty; `check`:
    the cluster's check of its request, with what is filled in.

    Raises Forbidden, InvalidField and what `check` raises for what is denied.
    """
    check_own_annotations(annotations_of(pod), {})
    if pod.spec is None or not asks_for_ours(pod, scheduler, offered):
        return []
    kubelet_shows_it = NODES in groups and MIRROR in annotations_of(pod)
    if kubelet_shows_it:
        return []
    check_no_bypass(pod.spec)
    request = reviewed_request(pod, namespace)
    filled = left_out(request)
    check(with_defaults(request, filled) if filled else request)
    changes = [change for each in filled for change in changes_of(each, pod.spec)]
    if not scheduler or pod.spec.scheduler_name == scheduler:
        return changes
    if pod.spec.scheduler_name in (None, "", DEFAULT_SCHEDULER):
        return [JsonPatch(path="/spec/schedulerName", value=scheduler), *changes]
    finding = f"{quoted([pod.spec.scheduler_name])} does not know which devices fit together"
    raise Forbidden("spec.schedulerName", finding, f"leave it out, or name {scheduler}")


def check_update(
    pod: ReviewedPod,
    before: ReviewedPod | None,
    namespace: str,
    scheduler: str,
    offered: Offered,
    check: Check = check_pod,
) -> None:
    """
    Raises Forbidden, InvalidField and what `check` raises for a pod of which an annotation of ours differs from `before`, as
    `changes_to` does for a new one. Its node, its scheduler and its containers were judged then. The other arguments are
    those of `changes_to`.
    """
    new = annotations_of(pod)
    old = annotations_of(before)
    check_own_annotations(new, old)
    if annotations_of_ours(new) != annotations_of_ours(old) and asks_for_ours(pod, scheduler, offered):
        check(reviewed_request(pod, namespace))


def check_binding(binding: ReviewedPod) -> None:
    """Raises Forbidden for an annotation of ours in a Binding, which would be the pod's."""
    for key in sorted(annotations_of_ours(annotations_of(binding))):
        raise Forbidden(annotation_path(clean(key)), "is not for a Binding to set", "write it when the pod is created")


def check_own_annotations(new: Mapping[str, str], old: Mapping[str, str]) -> None:
    """Raises Forbidden for an annotation of ours that is new or changed."""
    for key in sorted(new):
        if key.startswith(OWN_DOMAIN) and key not in OF_USERS and new[key] != old.get(key):
            raise Forbidden(
                annotation_path(clean(key)),
                "is not for users to write",
                f"leave it out; users write {', '.join(OF_USERS)}",
            )


def check_no_bypass(spec: ReviewedSpec) -> None:
    """Raises Forbidden for what would get devices without the scheduler, or more devices than are given."""
    if spec.node_name:
        raise Forbidden("spec.nodeName", "the pod would not pass the scheduler", "use a nodeSelector or affinity")
    for group, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for position, container in enumerate(containers or ()):
            if container.security_context is not None and container.security_context.privileged:
                where = f"spec.{group}[{position}].securityContext.privileged"
                raise Forbidden(
                    where, "a privileged container has all devices of its node", "add the capabilities it needs"
                )


def reviewed_request(pod: ReviewedPod, namespace: str) -> PodRequest:
    """What the pod asks for. Raises InvalidField for amounts that cannot be read."""
    request = with_counting(manifest.request_from_pod(pod))
    return msgspec.structs.replace(request, namespace=Namespace(namespace) if namespace else request.namespace)


def changes_of(filled: FilledIn, spec: ReviewedSpec) -> Iterator[JsonPatch]:
    """What is filled in of one container. A variable that it sets itself stays."""
    found = PLACE.fullmatch(filled.where)
    assert found is not None, "spec.containers[0]"
    group = found[1]
    position = int(found[2])
    at = f"/spec/{group}/{position}"
    for name, amount in filled.limits.items():
        yield JsonPatch(path=f"{at}/resources/limits/{name.replace('~', '~0').replace('/', '~1')}", value=str(amount))
    container = ((spec.init_containers if group == "initContainers" else spec.containers) or [])[position]
    env = list(container.env or [])
    for variable in ({"name": name, "value": value} for name, value in filled.environment.items()):
        if not env:
            yield JsonPatch(path=f"{at}/env", value=[variable])
        elif all(each.name != variable["name"] for each in env):
            yield JsonPatch(path=f"{at}/env/-", value=variable)


def asks_for_ours(pod: ReviewedPod, scheduler: str, offered: Offered) -> bool:
    """Whether the pod asks for devices that topoalign allocates. The arguments are those of `changes_to`."""
    if pod.spec is None:
        return False
    return any(is_own_resource(name, offered) for name in resources_of(pod.spec)) or is_as_koordinators(pod, scheduler)


def is_own_resource(resource: ResourceName, offered: Offered) -> bool:
    """Whether topoalign allocates this resource."""
    return resource in (GPU, NIC) or resource.startswith(OWN_DOMAIN) or ("/" in resource and offered(resource))


def is_as_koordinators(pod: ReviewedPod, scheduler: str) -> bool:
    """
    Whether a pod with Koordinator's annotations asks for GPUs by its names, and names no scheduler but the one that
    topoalign answers: Koordinator's own pods name its scheduler. `scheduler`: as of `changes_to`.
    """
    return (
        pod.spec is not None
        and is_joint(annotations_of(pod))
        and pod.spec.scheduler_name in (None, "", DEFAULT_SCHEDULER, scheduler)
        and any(name in GPU_RESOURCES for name in resources_of(pod.spec))
    )


def resources_of(spec: ReviewedSpec) -> Iterator[ResourceName]:
    """All that the containers name in requests or limits."""
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        if container.resources is not None:
            for amounts in (container.resources.limits, container.resources.requests):
                yield from map(ResourceName, amounts or ())


def paths_in_limits(spec: ReviewedSpec) -> dict[ResourceName, str]:
    """The resources that containers name in their limits, each with the path of one of them."""
    return {
        ResourceName(name): f"spec.{group}[{position}]"
        for group, containers in (("initContainers", spec.init_containers), ("containers", spec.containers))
        for position, container in enumerate(containers or ())
        if container.resources is not None
        for name in container.resources.limits or ()
    }


def names_another(spec: ReviewedSpec, scheduler: str) -> bool:
    """Whether a pod names another scheduler than the one that topoalign answers. `scheduler`: as of `changes_to`."""
    return bool(scheduler) and spec.scheduler_name not in (None, "", DEFAULT_SCHEDULER, scheduler)


def annotations_of_ours(annotations: Mapping[str, str]) -> dict[str, str]:
    """Those in `topoalign.io/`."""
    return {key: value for key, value in annotations.items() if key.startswith(OWN_DOMAIN)}


def annotations_of(pod: ReviewedPod | None) -> Mapping[str, str]:
    """Those of the pod."""
    annotations = pod.metadata.annotations if pod is not None and pod.metadata is not None else None
    return {key: value or "" for key, value in (annotations or {}).items()}
