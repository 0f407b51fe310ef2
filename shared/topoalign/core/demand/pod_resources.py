"""
Resources of a pod as a whole (`spec.resources`): what the API server takes, and what it fills in.

A pod as a whole asks for CPUs, memory and hugepages, never for devices. Its containers may ask for parts of that. A request
that is left out beside a limit is what the containers request together, or the limit if they request nothing. Example: with
limits of 8 CPUs and 16 GiB, and containers that request 2 and 3 CPUs, the pod requests 5 CPUs and 16 GiB.

Source: Kubernetes v1.36, defaultPodRequests (pkg/apis/core/v1/defaults.go) and validatePodResourceConsistency
(pkg/apis/core/validation).
"""

from collections.abc import Iterable

from topoalign.core.demand.quantities import asked, pod_wide
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import PodRequest, PodResources


def check_pod_resource_names(path: str, resources: Iterable[ResourceName]) -> None:
    """`path`: `spec.resources.limits`. Raises InvalidField for a resource that a pod as a whole cannot have."""
    for name in resources:
        if not is_native(name):
            finding = "a pod as a whole has only cpu, memory and hugepages-<size>"
            remedy = "give it to a container (spec.containers[].resources)" if "/" in name else "leave it out"
            raise InvalidField(f"{path}[{clean(name, 80)}]", finding, remedy)


def with_pod_requests(pod: PodRequest) -> PodResources:
    """The resources of a pod as a whole with their requests filled in, where the requests of its containers are."""
    limits, requests = pod.resources.limits, pod.resources.requests
    if not limits:
        return pod.resources
    together = pod_wide(pod, asked)
    of_containers = {name: together[name] for name in (CPU, MEMORY) if name in together}
    return PodResources(limits=limits, requests={**limits, **of_containers, **requests})


def check_pod_resources(pod: PodRequest) -> None:
    """
    `pod`: with all requests filled in. Raises InvalidField where the resources of the pod as a whole contradict one another
    or those of its containers.
    """
    limits, requests = pod.resources.limits, pod.resources.requests
    for name, amount in pod_wide(pod, asked).items():
        for kind, whole in (("limits", limits), ("requests", requests)):
            if name in whole and amount > whole[name]:
                finding = f"{whole[name]} is less than the {amount} that the containers request together"
                raise wrong(kind, name, finding, "raise it, or lower the requests of the containers")
    for name, amount in requests.items():
        limit = limits.get(name)
        if limit is not None and amount > limit:
            raise wrong(
                "requests", name, f"{amount} is above the limit {limit}", "raise the limit or lower the request"
            )
        if is_hugepages(name) and amount != limit:
            finding = "has no limit" if limit is None else f"{amount} differs from its limit {limit}"
            raise wrong("requests", name, finding, "hugepages need equal ones")
    for position, container in enumerate(pod.containers):
        for name, amount in container.limits.items():
            if name in limits and amount > limits[name]:
                raise InvalidField(
                    f"pod.containers[{position}].limits[{name}]",
                    f"{amount} is above the limit {limits[name]} of the pod as a whole",
                    "lower it, or raise the limit in spec.resources",
                )


def wrong(kind: str, name: ResourceName, finding: str, remedy: str) -> InvalidField:
    """The error about a resource of the pod as a whole."""
    return InvalidField(f"pod.resources.{kind}[{name}]", finding, remedy)
