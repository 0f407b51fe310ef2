"""The suite `kubelet/pod_requests`, and pods as case files write them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.cli.conformance.case_files import cases
from topoalign.cli.conformance.suite import CaseResult
from topoalign.core.hints.requested import cpu_request, device_request, memory_request, pod_wide
from topoalign.core.ids import PodName, ResourceName
from topoalign.core.requests import ContainerRequest, Mode, PodRequest, Qos


class Pod(msgspec.Struct, frozen=True):
    name: PodName
    qos: Qos
    init_containers: tuple[ContainerRequest, ...]
    containers: tuple[ContainerRequest, ...]

    @property
    def read(self) -> PodRequest:
        return PodRequest(name=self.name, init_containers=self.init_containers, containers=self.containers)


class Expected(msgspec.Struct, frozen=True):
    pod_requests: dict[ResourceName, int]
    pod_limits: dict[ResourceName, int]
    exclusive_cpus: int
    memory_manager: dict[ResourceName, int]
    device_requests: dict[ResourceName, int]


class PodRequestsCase(msgspec.Struct, frozen=True):
    id: str
    pod: Pod
    device_resources: list[ResourceName]
    expect: Expected


def pod_requests(path: Path) -> Iterator[CaseResult]:
    for case in cases(path, PodRequestsCase):
        pod = case.pod.read
        devices = {n: amount for n, amount in device_request(pod, None).items() if n in case.device_resources}
        got = Expected(
            pod_requests=pod_wide(pod, lambda container: container.requests),
            pod_limits=pod_wide(pod, lambda container: container.limits),
            exclusive_cpus=cpu_request(pod, None, Mode.KUBELET),
            memory_manager=memory_request(pod, None, Mode.KUBELET),
            device_requests=devices,
        )
        yield CaseResult(case.id, (case.pod.qos, case.expect), (pod.qos, got))
