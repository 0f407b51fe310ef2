"""Translates field paths of a `PodRequest` (`pod.containers[0].limits`) to those of the pod's manifest."""

import re
from collections.abc import Iterator

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.requests import ContainerRequest, PodRequest

AMOUNT = re.compile(r"pod\.(\w+\[\d+\])\.(requests|limits)(?=\[|$)")
"""Of a container; a Pod has it in `resources`."""
PARTS = {
    "pod.initContainers": "spec.initContainers",
    "pod.containers": "spec.containers",
    "pod.resources": "spec.resources",
    "pod.resourceClaims": "spec.resourceClaims",
    "pod.annotations": "metadata.annotations",
    "pod.namespace": "metadata.namespace",
    "pod.name": "metadata.name",
}
"""How a path begins in a PodRequest -> in a Pod; the first that fits."""


def path_in_manifest(field: str) -> str:
    """The path in a Pod; one that is of no PodRequest stays as it is."""
    field = AMOUNT.sub(r"spec.\1.resources.\2", field, count=1)
    for begin, instead in PARTS.items():
        if field.startswith(begin):
            return instead + field.removeprefix(begin)
    return field


def in_manifest(error: InvalidField) -> InvalidField:
    """The same error with the path of the manifest."""
    return InvalidField(path_in_manifest(error.field), error.finding.removeprefix(f"{error.field}: "), error.remedy)


def containers_with_paths(pod: PodRequest) -> Iterator[tuple[str, ContainerRequest]]:
    """The pod's containers with their paths in its manifest."""
    for group, containers in (("initContainers", pod.init_containers), ("containers", pod.containers)):
        for position, container in enumerate(containers):
            yield f"spec.{group}[{position}]", container
