"""Translates field paths of a `PodRequest` (`pod.containers[0].limits`) to those of the pod's manifest."""

import re
from collections.abc import Iterator

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.requests import ContainerRequest, PodRequest

AMOUNT = re.compile(r"pod\.(\w+\[\d+\])\.(requests|limits)(?=\[|$)")
"""A path to an amount of a container. In a Pod, the amount is in `resources`."""
PARTS = {
    "pod.initContainers": "spec.initContainers",
    "pod.containers": "spec.containers",
    "pod.resources": "spec.resources",
    "pod.resourceClaims": "spec.resourceClaims",
    "pod.annotations": "metadata.annotations",
    "pod.namespace": "metadata.namespace",
    "pod.name": "metadata.name",
}
"""Prefix of a path in a PodRequest -> its prefix in a Pod. The first matching prefix applies."""


def in_manifest(error: InvalidField) -> InvalidField:
    """The same error with the path in the manifest. A path that is not in a PodRequest is not changed."""
    path = AMOUNT.sub(r"spec.\1.resources.\2", error.field, count=1)
    begin = next((each for each in PARTS if path.startswith(each)), "")
    path = PARTS.get(begin, "") + path.removeprefix(begin)
    return InvalidField(path, error.finding.removeprefix(f"{error.field}: "), error.remedy)


def containers_with_paths(pod: PodRequest) -> Iterator[tuple[str, ContainerRequest]]:
    """The pod's containers with their paths in its manifest."""
    for group, containers in (("initContainers", pod.init_containers), ("containers", pod.containers)):
        for position, container in enumerate(containers):
            yield f"spec.{group}[{position}]", container
