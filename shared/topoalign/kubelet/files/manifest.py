"""
Reads a pod's manifest: the requests and limits of each container, annotations, and other fields that affect a decision.

A null field counts as missing, as in Kubernetes; a null amount is 0, and a null annotation is empty. A pod can have no
`kind` and `apiVersion`, because kube-scheduler omits them where only a Pod is possible. Values that an API server would
add, such as the defaults of a LimitRange, are unknown here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.demand.field_paths import in_manifest
from topoalign.core.demand.gangs import find_pod_groups
from topoalign.core.demand.node_filters import Affinity, Constraints, Toleration
from topoalign.core.demand.pod_validation import check_pod_level_names, validate_pod
from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.ids import (
    CPU,
    MEMORY,
    ContainerName,
    Namespace,
    PodName,
    ResourceName,
    is_hugepages,
    is_native,
)
from topoalign.core.model.requests import ContainerRequest, PodGroupReference, PodLevelResources, PodRequest
from topoalign.kubelet.files import documents, resource_quantities
from topoalign.kubelet.files.resource_quantities import whole

KIND = "Pod"
API_VERSION = "v1"
REMEDY = "write it as a v1 Pod has it"
RESOURCE_FIELDS = ("limits", "requests", "claims")
EPHEMERAL_STORAGE = "ephemeral-storage"

Amounts = dict[str, str | int | float | None]


class ManifestResources(msgspec.Struct, frozen=True):
    """The field `resources` of a container or pod."""

    requests: Amounts | None = None
    limits: Amounts | None = None


class ManifestContainer(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a container that affect a decision."""

    name: str
    resources: ManifestResources | None = None
    restart_policy: str | None = None


class ResourceClaim(msgspec.Struct, frozen=True, rename="camel"):
    """An entry of a pod's `spec.resourceClaims`, or of its `status.resourceClaimStatuses`."""

    name: str = ""
    resource_claim_template_name: str | None = None


class SchedulingGroup(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's `spec.schedulingGroup` (Kubernetes v1.36)."""

    pod_group_name: str | None = None


class ManifestSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields of `spec` that affect a decision, and those that restrict the nodes of the pod."""

    containers: list[ManifestContainer] | None = None
    init_containers: list[ManifestContainer] | None = None
    resources: ManifestResources | None = None
    resource_claims: list[ResourceClaim] | None = None
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None
    scheduler_name: str | None = None
    scheduling_group: SchedulingGroup | None = None


class ManifestStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of `status` that scheduler calls need."""

    nominated_node_name: str | None = None


class ManifestMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of `metadata` that affect a decision or name the pod."""

    annotations: dict[str, str | None] | None = None
    labels: dict[str, str | None] | None = None
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None


class PodManifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A v1 Pod."""

    metadata: ManifestMetadata | None = None
    spec: ManifestSpec | None = None
    status: ManifestStatus | None = None


def load_manifest(path: Path) -> PodManifest:
    """The manifest in a file. Raises NotFound, InvalidDocument, InvalidField, also for what an API server rejects."""
    document = documents.parse_document(documents.read_bounded(path), str(path), nulls=True)  # a null amount is 0
    pod = read_manifest(document)
    check_resource_keys(document)
    return pod


def request_from_document(document: documents.Document) -> PodRequest:
    """Raises InvalidField with the path of a value that is wrong."""
    return request_from_pod(read_manifest(document))


def read_manifest(document: documents.Document) -> PodManifest:
    """The manifest of a pod. Raises InvalidField for another kind of object, and with the path of a value that is wrong."""
    kind = document.get("kind") or KIND  # missing fields count as right
    version = document.get("apiVersion") or API_VERSION
    if (kind, version) != (KIND, API_VERSION):
        remedy = "give a Pod: of a Deployment or Job, `spec.template` with `apiVersion: v1` and `kind: Pod` added"
        raise documents.other_kind(document, KIND, API_VERSION, remedy)
    remedy = f"{REMEDY}, with texts such as annotations in quotes"
    pod: PodManifest = documents.convert_document(document, PodManifest, remedy)
    return pod


def check_resource_keys(document: documents.Document) -> None:
    """
    Raises InvalidField for an unknown field in `resources` of a container, and for a name there that is not a resource,
    because such a pod would seem to request nothing. An API server rejects them (v1.36.3, strict field validation and
    IsStandardContainerResourceName). `document`: a pod that `read_manifest` has accepted.
    """
    spec = document.get("spec") or {}
    for group in ("initContainers", "containers"):
        for position, container in enumerate(spec.get(group) or []):
            check_resource_names(f"spec.{group}[{position}].resources", container.get("resources") or {})


def check_resource_names(path: str, resources: documents.Document) -> None:
    """Raises InvalidField for an unknown field of `resources`, and for a name that is not a resource."""
    for key in resources:
        if key not in RESOURCE_FIELDS:
            remedy = f"it has {', '.join(RESOURCE_FIELDS)}: write amounts inside limits"
            raise InvalidField(f"{path}.{clean(str(key))}", "is no field of resources", remedy)
    for kind in ("limits", "requests"):
        for name in resources.get(kind) or {}:
            if "/" not in name and name != EPHEMERAL_STORAGE and not is_native(name):
                remedy = "write cpu, memory, hugepages-<size>, ephemeral-storage, or a name with a domain"
                raise InvalidField(f"{path}.{kind}[{clean(name)}]", "is no resource of a container", remedy)


def request_from_pod(pod: PodManifest) -> PodRequest:
    """The request of a pod. Raises InvalidField with the path of a value that is wrong."""
    metadata = pod.metadata or ManifestMetadata()
    spec = pod.spec
    if spec is None:
        raise InvalidField("spec", "there is none", REMEDY)
    if not spec.containers:
        raise InvalidField("spec.containers", "there is none", "a pod has at least one container")
    request = PodRequest(
        namespace=Namespace(metadata.namespace or "default"),
        name=PodName(metadata.name or (metadata.generate_name or "").rstrip("-") or "pod"),
        annotations={key: value or "" for key, value in (metadata.annotations or {}).items()},
        init_containers=requests_of("initContainers", spec.init_containers or []),
        containers=requests_of("containers", spec.containers),
        resources=pod_level_resources_of(spec.resources or ManifestResources()),
        claims=tuple(claim.name for claim in spec.resource_claims or ()),
        pod_groups=pod_groups_of(pod),
    )
    try:
        return validate_pod(request)
    except InvalidField as error:
        raise in_manifest(error) from error


def pod_groups_of(pod: PodManifest) -> tuple[PodGroupReference, ...]:
    """The names of PodGroups in the manifest."""
    metadata = pod.metadata or ManifestMetadata()
    group = (pod.spec and pod.spec.scheduling_group) or SchedulingGroup()
    return find_pod_groups(group.pod_group_name, metadata.labels or {}, metadata.annotations or {})


def constraints_of(pod: PodManifest) -> Constraints:
    """The constraints on the nodes of the pod."""
    spec = pod.spec or ManifestSpec()
    node_affinity = spec.affinity and spec.affinity.node_affinity
    required = node_affinity.required if node_affinity else None
    return Constraints(spec.node_selector or {}, required, spec.tolerations or ())


def pod_level_resources_of(resources: ManifestResources) -> PodLevelResources:
    """The pod-level resources. Raises InvalidField with the path of a wrong amount or of another resource."""
    found = {}
    for kind, given in (("requests", resources.requests or {}), ("limits", resources.limits or {})):
        path = f"spec.resources.{kind}"
        check_pod_level_names(path, map(ResourceName, given))
        found[kind] = read_amounts(path, given)
    return PodLevelResources(**found)


def requests_of(group: str, containers: list[ManifestContainer]) -> tuple[ContainerRequest, ...]:
    """The requests of the containers in `spec.<group>`. Raises InvalidField with the path of an invalid amount."""
    return tuple(
        ContainerRequest(
            name=ContainerName(container.name),
            requests=read_amounts(f"{path}.requests", resources.requests or {}),
            limits=read_amounts(f"{path}.limits", resources.limits or {}),
            sidecar=group == "initContainers" and container.restart_policy == "Always",
        )
        for position, container in enumerate(containers)
        for path, resources in [(f"spec.{group}[{position}].resources", container.resources or ManifestResources())]
    )


def read_amounts(path: str, given: Amounts) -> dict[ResourceName, int]:
    """Amounts in the units of `core.model.requests`. Omits resources without a manager, such as ephemeral storage."""
    found: dict[ResourceName, int] = {}
    for name, text in given.items():
        value = 0 if text is None else text  # a Quantity that is null (apimachinery v0.36, resource.Quantity)
        resource = ResourceName(name)
        field = f"{path}[{clean(name)}]"
        if resource == CPU:
            found[resource] = amount(field, value, "cpu")
        elif resource == MEMORY or is_hugepages(resource):
            found[resource] = amount(field, value, "bytes")
        elif "/" in resource:
            found[resource] = amount(field, value, "devices")
    return found


def amount(field: str, value: str | float, unit: Literal["cpu", "bytes", "devices"]) -> int:
    """An amount in thousandths of a CPU, bytes or devices. Raises InvalidField with its path."""
    read = resource_quantities.thousandths if unit == "cpu" else resource_quantities.whole
    found = read(str(value))
    if found is None or (unit == "devices" and resource_quantities.exact(str(value)) != found):
        examples = {"cpu": "500m or 2", "bytes": "64Gi or a number of bytes", "devices": "a whole number, 0 or more"}
        raise InvalidField(field, f"{quoted([str(value)])} is no amount", f"write {examples[unit]}")
    return found


LIMITS = "limits."


def read_quota_limits(hard: Mapping[str, str | int | float]) -> dict[ResourceName, int]:
    """
    Extended resource -> its limit in `spec.hard` of a ResourceQuota. Kubernetes does not enforce it. An invalid
    amount is ignored. `limits.nvidia.com/gpumem: 2k` means 2000. `limits.cpu` is omitted: Kubernetes enforces it.
    """
    return {
        ResourceName(name.removeprefix(LIMITS)): amount
        for name, text in hard.items()
        if name.startswith(LIMITS) and "/" in name and (amount := whole(str(text))) is not None
    }
