"""The suite `kubelet/pod_requests`, and pods in the format of case files."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.core.demand.resource_quantities import device_limits, effective_requests, pod_cpus, pod_memory, pod_wide
from topoalign.core.model.ids import CPU, MEMORY, PodName, ResourceName, is_hugepages
from topoalign.core.model.requests import ContainerRequest, PodLevelResources, PodRequest, Qos
from topoalign.core.profile import KUBELET
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome


class Pod(msgspec.Struct, frozen=True):
    """A pod of a case."""

    name: PodName
    qos: Qos
    containers: tuple[ContainerRequest, ...]
    init_containers: tuple[ContainerRequest, ...] = ()
    resources: PodLevelResources = PodLevelResources()

    @property
    def read(self) -> PodRequest:
        """The pod in the types of the product."""
        return PodRequest(
            name=self.name,
            init_containers=self.init_containers,
            containers=self.containers,
            resources=self.resources,
        )


def as_the_kubelet_reads(pod: PodRequest) -> PodRequest:
    """
    The same to the kubelet, for cases with pods that no API server takes: devices without a limit, or with another one;
    containers that request more than their pod.

    Of devices the kubelet's managers look at limits alone, of hugepages at requests alone, and of pod-level resources at
    whether there are any.
    """
    groups = (tuple(map(evened, group)) for group in (pod.init_containers, pod.containers))
    init_containers, containers = groups
    together = pod_wide(pod, effective_requests)
    requests = {name: max(amount, together.get(name, 0)) for name, amount in pod.resources.requests.items()}
    resources = PodLevelResources(requests=requests, limits=pod.resources.limits)
    return msgspec.structs.replace(pod, init_containers=init_containers, containers=containers, resources=resources)


def evened(container: ContainerRequest) -> ContainerRequest:
    """The container with equal requests and limits: devices by their limits, hugepages by their requests."""
    requests = dict(container.requests)
    limits = dict(container.limits)
    for name, amount in container.requests.items():
        if is_hugepages(name):
            limits[name] = amount
        elif name in limits and name not in (CPU, MEMORY):
            requests[name] = limits[name]
        elif name not in (CPU, MEMORY):
            del requests[name]
    return msgspec.structs.replace(container, requests=requests, limits=limits)


class Expected(msgspec.Struct, frozen=True):
    """The expected sums of a pod."""

    pod_requests: dict[ResourceName, int]
    pod_limits: dict[ResourceName, int]
    exclusive_cpus: int
    memory_manager: dict[ResourceName, int]
    device_requests: dict[ResourceName, int]


class PodRequestsCase(msgspec.Struct, frozen=True):
    """A case of `kubelet/pod_requests`."""

    id: str
    pod: Pod
    device_resources: list[ResourceName]
    expect: Expected


def pod_requests(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/pod_requests`."""
    return results(path, PodRequestsCase, outcome)


def outcome(case: PodRequestsCase) -> Outcome:
    """Expected and actual sums of a case."""
    pod = case.pod.read
    devices = {n: amount for n, amount in pod_wide(pod, device_limits).items() if n in case.device_resources}
    got = Expected(
        pod_requests=pod_wide(pod, lambda container: container.requests),
        pod_limits=pod_wide(pod, lambda container: container.limits),
        exclusive_cpus=pod_cpus(pod, KUBELET),
        memory_manager=pod_memory(pod, KUBELET),
        device_requests=devices,
    )
    return (case.pod.qos, case.expect), (pod.qos, got)
