"""
Validates every field of a pod before a decision about the pod.

The API server's rules for fields are applied here, because no API server has validated a pod of `topoalign allocate`.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from topoalign.core.demand.resource_quantities import Quantities, effective_requests, pod_wide
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import (
    LARGEST_QUANTITY,
    MOST_CONTAINERS,
    ContainerRequest,
    PodLevelResources,
    PodRequest,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Allows more than Kubernetes, for pods that no API server validated, but no names that could be taken for a path."""

ANNOTATION = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

MOST_RESOURCES = 64
MOST_ANNOTATIONS = 1_000
MOST_ANNOTATED = 256 * 1024
"""Maximum total number of characters of all annotations. The API server has the same limit in bytes."""


def validate_pod(pod: PodRequest) -> PodRequest:
    """Validates the pod and returns it with missing requests set to the limits. Raises InvalidField."""
    if not pod.containers:
        raise InvalidField("pod.containers", "empty", "a pod has at least one container")
    groups = (("pod.initContainers", pod.init_containers), ("pod.containers", pod.containers))
    _check_object_name("pod.namespace", pod.namespace)
    _check_object_name("pod.name", pod.name)
    _check_annotation_sizes(pod.annotations)
    if len(pod.init_containers) + len(pod.containers) > MOST_CONTAINERS:
        raise InvalidField(
            "pod.containers", f"more than {MOST_CONTAINERS} containers, init containers included", "split the pod"
        )
    for position, claim in enumerate(pod.claims):
        _check_object_name(f"pod.resourceClaims[{position}].name", claim)
    seen: set[str] = set()
    for path, containers in groups:
        for position, container in enumerate(containers):
            where = f"{path}[{position}]"
            _check_object_name(f"{where}.name", container.name)
            if container.name in seen:
                raise InvalidField(
                    f"{where}.name", f"{container.name!r} stands twice", "give each container its own name"
                )
            seen.add(container.name)
            if container.sidecar and path == "pod.containers":
                raise InvalidField(f"{where}.sidecar", "set on an app container", "move it to initContainers")
            _check_quantities(f"{where}.requests", container.requests)
            _check_quantities(f"{where}.limits", container.limits)
            _check_limits(where, container.requests, container.limits)
    filled = msgspec.structs.replace(
        pod,
        init_containers=tuple(map(_with_requests, pod.init_containers)),
        containers=tuple(map(_with_requests, pod.containers)),
    )
    if not pod.has_pod_level_resources:
        return filled
    limits = pod.resources.limits
    requests = pod.resources.requests
    for kind, amounts in (("requests", requests), ("limits", limits)):
        _check_quantities(f"pod.resources.{kind}", amounts)
        check_pod_level_names(f"pod.resources.{kind}", amounts)
    if limits:
        together = pod_wide(filled, effective_requests)
        of_containers = {name: together[name] for name in (CPU, MEMORY) if name in together}
        resources = PodLevelResources(limits=limits, requests={**limits, **of_containers, **requests})
        filled = msgspec.structs.replace(filled, resources=resources)
    _check_pod_level_resources(filled)
    return filled


def _with_requests(container: ContainerRequest) -> ContainerRequest:
    # as the API server does
    return msgspec.structs.replace(container, requests={**container.limits, **container.requests})


def _check_object_name(path: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidField(
            path,
            f"{clean(name, 60)!r} is not a name",
            "use 1 to 253 letters, digits, `-`, `_` and `.`, a letter or digit first",
        )


def _check_annotation_sizes(annotations: Mapping[str, str]) -> None:
    """Checks sizes and keys. The values are checked when they are read."""
    size = sum(len(key) + len(value) for key, value in annotations.items())
    if len(annotations) > MOST_ANNOTATIONS or size > MOST_ANNOTATED:
        most = f"at most {MOST_ANNOTATIONS} with {MOST_ANNOTATED} characters"
        raise InvalidField("pod.annotations", f"{len(annotations)} with {size} characters", f"give {most}")
    for key in annotations:
        if not ANNOTATION.fullmatch(key):
            where = f"pod.annotations[{clean(key, 80)}]"
            raise InvalidField(where, "not a key of annotations", "use keys such as example.com/purpose")


def _check_quantities(path: str, quantities: Mapping[ResourceName, int]) -> None:
    if len(quantities) > MOST_RESOURCES:
        raise InvalidField(path, f"{len(quantities)} resources", f"ask for at most {MOST_RESOURCES}")
    for resource, amount in quantities.items():
        where = f"{path}[{clean(resource, 80)}]"
        if not resource or len(resource) > 317 or resource != clean(resource, 317):
            raise InvalidField(where, "not a resource name", "use names such as cpu, memory or nvidia.com/gpu")
        if not 0 <= amount <= LARGEST_QUANTITY:
            raise InvalidField(
                where,
                f"{clean(str(amount), 30)} is outside 0 to 2^63-1",
                "ask for a whole number that a machine can have",
            )


def _check_limits(path: str, requests: Quantities, limits: Quantities) -> None:
    """Checks Kubernetes' rules: no request exceeds its limit; requests for devices and hugepages equal their limits."""
    for resource, amount in requests.items():
        limit = limits.get(resource)
        if limit is not None and amount > limit:
            raise InvalidField(
                f"{path}.requests[{resource}]",
                f"{amount} is above the limit {limit}",
                "raise the limit or lower the request",
            )
        if resource not in (CPU, MEMORY) and limit != amount:
            kind = "hugepages" if is_hugepages(resource) else "a device"
            finding = "has no limit" if limit is None else f"{amount} differs from its limit {limit}"
            raise InvalidField(f"{path}.requests[{resource}]", finding, f"{kind} needs equal ones")


# Pod-level resources (`spec.resources`): what the API server accepts, and which defaults it sets.
#
# They are CPU, memory and hugepages, but not devices. Containers can request parts of them. If a pod-level limit has no
# request, the request defaults to the total that the containers request, or to the limit if they request nothing.
# Example: with limits of 8 CPUs and 16 GiB, and containers that request 2 and 3 CPUs, the pod requests 5 CPUs and
# 16 GiB.
#
# Source: Kubernetes v1.36, defaultPodRequests (pkg/apis/core/v1/defaults.go) and validatePodResourceConsistency
# (pkg/apis/core/validation).


def check_pod_level_names(path: str, resources: Iterable[ResourceName]) -> None:
    """Raises InvalidField for a name that is not a pod-level resource. `path`: such as `spec.resources.limits`."""
    for name in resources:
        if not is_native(name):
            finding = "only cpu, memory and hugepages-<size> are pod-level resources"
            remedy = "give it to a container (spec.containers[].resources)" if "/" in name else "leave it out"
            raise InvalidField(f"{path}[{clean(name, 80)}]", finding, remedy)


def _check_pod_level_resources(pod: PodRequest) -> None:
    """Raises InvalidField if pod-level resources contradict each other or those of the containers."""
    limits = pod.resources.limits
    requests = pod.resources.requests
    for name, amount in pod_wide(pod, effective_requests).items():
        for kind, whole in (("limits", limits), ("requests", requests)):
            if name in whole and amount > whole[name]:
                finding = f"{whole[name]} is less than the {amount} that the containers request together"
                remedy = "raise it, or lower the requests of the containers"
                raise InvalidField(f"pod.resources.{kind}[{name}]", finding, remedy)
    _check_limits("pod.resources", requests, limits)
    for position, container in enumerate(pod.containers):
        for name, amount in container.limits.items():
            if name in limits and amount > limits[name]:
                raise InvalidField(
                    f"pod.containers[{position}].limits[{name}]",
                    f"{amount} is above the limit {limits[name]} of the pod",
                    "lower it, or raise the limit in spec.resources",
                )
