"""
A pod's manifest, as far as it bears on a decision: what each container requests and is limited to.

What an API server would add, such as the defaults of a LimitRange, is not known here.
"""

from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.checks import checked
from topoalign.core.errors import InvalidField, clean, quoted
from topoalign.core.ids import CPU, MEMORY, ContainerName, Namespace, PodName, ResourceName, is_hugepages
from topoalign.core.requests import ContainerRequest, PodRequest
from topoalign.kubelet import documents, quantities

Amounts = dict[str, str | int | float]


class Resources(msgspec.Struct, frozen=True):
    requests: Amounts = {}
    limits: Amounts = {}


class Container(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resources: Resources = Resources()
    restart_policy: str = ""


class Spec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    containers: list[Container]
    init_containers: list[Container] = []
    resources: Resources | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    annotations: dict[str, str] | None = None
    name: str = ""
    generate_name: str = ""
    namespace: str = ""


class Pod(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A v1 Pod."""

    metadata: Metadata = Metadata()
    spec: Spec


def load(path: Path) -> PodRequest:
    """The pod in a file. Raises NotFound, InvalidDocument, InvalidField."""
    return pod_of(documents.load(path))


def pod_of(document: documents.Document) -> PodRequest:
    """Raises InvalidField with the path of a value that is wrong."""
    documents.expect_kind(document, "Pod", "v1", "give a Pod; of a Deployment or Job, its template as a Pod")
    pod: Pod = documents.converted(document, Pod, "write it as a v1 Pod has it")
    if pod.spec.resources is not None:
        raise InvalidField("spec.resources", "resources of a whole pod", "give them to its containers")
    return checked(
        PodRequest(
            namespace=Namespace(pod.metadata.namespace or "default"),
            name=PodName(pod.metadata.name or pod.metadata.generate_name.rstrip("-") or "pod"),
            annotations=pod.metadata.annotations or {},
            init_containers=requests_of("initContainers", pod.spec.init_containers),
            containers=requests_of("containers", pod.spec.containers),
        )
    )


def requests_of(group: str, containers: list[Container]) -> tuple[ContainerRequest, ...]:
    return tuple(
        ContainerRequest(
            name=ContainerName(container.name),
            requests=amounts(f"spec.{group}[{position}].resources.requests", container.resources.requests),
            limits=amounts(f"spec.{group}[{position}].resources.limits", container.resources.limits),
            sidecar=group == "initContainers" and container.restart_policy == "Always",
        )
        for position, container in enumerate(containers)
    )


def amounts(path: str, given: Amounts) -> dict[ResourceName, int]:
    """In the units of `core.requests`. What no manager of the kubelet hands out, such as ephemeral storage, is left out."""
    found: dict[ResourceName, int] = {}
    for name, value in given.items():
        resource, field = ResourceName(name), f"{path}[{clean(name)}]"
        if resource == CPU:
            found[resource] = amount(field, value, "cpu")
        elif resource == MEMORY or is_hugepages(resource):
            found[resource] = amount(field, value, "bytes")
        elif "/" in resource:
            found[resource] = amount(field, value, "devices")
    return found


def amount(field: str, value: str | float, unit: Literal["cpu", "bytes", "devices"]) -> int:
    read = quantities.thousandths if unit == "cpu" else quantities.whole
    found = read(str(value))
    if found is None or (unit == "devices" and quantities.exact(str(value)) != found):
        why = quantities.wrong(str(value)) if found is None else "is no amount"
        examples = {"cpu": "500m or 2", "bytes": "64Gi or a number of bytes", "devices": "a whole number of devices"}
        raise InvalidField(field, f"{quoted([str(value)])} {why}", f"write {examples[unit]}")
    return found
