"""
Pod-level resources (`spec.resources`): what the API server takes, and what it fills in.

They are CPUs, memory and hugepages, never devices, and containers may ask for parts of them. A pod-level request
that is left out beside a limit is what the containers request together, or the limit if they request nothing. Example: with
limits of 8 CPUs and 16 GiB, and containers that request 2 and 3 CPUs, the pod requests 5 CPUs and 16 GiB.

Source: Kubernetes v1.36, defaultPodRequests (pkg/apis/core/v1/defaults.go) and validatePodResourceConsistency
(pkg/apis/core/validation).
"""

from collections.abc import Iterable

from topoalign.core.demand.quantities import asked, pod_wide
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import PodLevelResources, PodRequest


def check_pod_level_names(path: str, resources: Iterable[ResourceName]) -> None:
    """`path`: `spec.resources.limits`. Raises InvalidField for what is no pod-level resource."""
    for name in resources:
        if not is_native(name):
            finding = "only cpu, memory and hugepages-<size> are pod-level resources"
            remedy = "give it to a container (spec.containers[].resources)" if "/" in name else "leave it out"
            raise InvalidField(f"{path}[{clean(name, 80)}]", finding, remedy)


def with_pod_level_requests(pod: PodRequest) -> PodLevelResources:
    """The pod-level resources with their requests filled in. `pod`: with the requests of its containers filled in."""
    limits = pod.resources.limits
    requests = pod.resources.requests
    if not limits:
        return pod.resources
    together = pod_wide(pod, asked)
    of_containers = {name: together[name] for name in (CPU, MEMORY) if name in together}
    return PodLevelResources(limits=limits, requests={**limits, **of_containers, **requests})


def check_pod_level_resources(pod: PodRequest) -> None:
    """
    `pod`: with all requests filled in. Raises InvalidField where pod-level resources contradict one another or those of the
    containers.
    """
    limits = pod.resources.limits
    requests = pod.resources.requests
    for name, amount in pod_wide(pod, asked).items():
        for kind, whole in (("limits", limits), ("requests", requests)):
            if name in whole and amount > whole[name]:
                finding = f"{whole[name]} is less than the {amount} that the containers request together"
                raise pod_level_error(kind, name, finding, "raise it, or lower the requests of the containers")
    for name, amount in requests.items():
        limit = limits.get(name)
        if limit is not None and amount > limit:
            raise pod_level_error(
                "requests", name, f"{amount} is above the limit {limit}", "raise the limit or lower the request"
            )
        if is_hugepages(name) and amount != limit:
            finding = "has no limit" if limit is None else f"{amount} differs from its limit {limit}"
            raise pod_level_error("requests", name, finding, "hugepages need equal ones")
    for position, container in enumerate(pod.containers):
        for name, amount in container.limits.items():
            if name in limits and amount > limits[name]:
                raise InvalidField(
                    f"pod.containers[{position}].limits[{name}]",
                    f"{amount} is above the limit {limits[name]} of the pod",
                    "lower it, or raise the limit in spec.resources",
                )


def pod_level_error(kind: str, name: ResourceName, finding: str, remedy: str) -> InvalidField:
    """The error about a pod-level resource."""
    return InvalidField(f"pod.resources.{kind}[{name}]", finding, remedy)
