"""
Reads which gang a pod belongs to: a group of pods that start together or not at all.

A pod names its gang by annotations, or by a PodGroup of its namespace. The PodGroup has the number of pods:

    metadata.annotations[topoalign.io/gang]: llama-70b       name of the gang
    metadata.annotations[topoalign.io/gang-size]: "64"       number of pods in the gang

    spec.schedulingGroup.podGroupName                        Kubernetes v1.36, scheduling.k8s.io
    metadata.labels[scheduling.x-k8s.io/pod-group]           Coscheduling, scheduling.x-k8s.io
    metadata.annotations[pod-group-name]                     KAI Scheduler, scheduling.run.ai
    metadata.annotations[scheduling.k8s.io/group-name]       Volcano, scheduling.volcano.sh
    metadata.annotations[scheduling.volcano.sh/group-name]   Volcano, scheduling.volcano.sh
"""

import re
from collections.abc import Mapping

import msgspec

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.requests import GANG, GANG_SIZE, PodGroupReference, PodRequest

NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
SIZE = re.compile(r"[1-9][0-9]{0,3}")

NATIVE = "scheduling.k8s.io"
COSCHEDULING = "scheduling.x-k8s.io"
KAI = "scheduling.run.ai"
VOLCANO = "scheduling.volcano.sh"
POD_GROUPS = (NATIVE, COSCHEDULING, KAI, VOLCANO)
"""API groups of PodGroups."""
GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
GROUP_ANNOTATIONS: Mapping[str, str] = {
    "pod-group-name": KAI,
    "scheduling.k8s.io/group-name": VOLCANO,
    "scheduling.volcano.sh/group-name": VOLCANO,
}
"""Annotation of a pod -> the API group of the PodGroup that it names."""


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """The gang that a pod belongs to."""

    name: str
    """`namespace/name`."""
    size: int | None
    """Number of its pods, from 1. None: its PodGroup has the minimum number."""
    api_groups: tuple[str, ...] = ()
    """API groups of the PodGroups that the pod names, in the order of this module. Each has the name of the gang."""


def find_pod_groups(
    native: str | None, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
) -> tuple[PodGroupReference, ...]:
    """The names of PodGroups in a pod's manifest. `native`: `spec.schedulingGroup.podGroupName`."""
    found = [
        ("spec.schedulingGroup.podGroupName", NATIVE, native),
        (f"metadata.labels[{GROUP_LABEL}]", COSCHEDULING, labels.get(GROUP_LABEL)),
        *((annotation_path(key), api_group, annotations.get(key)) for key, api_group in GROUP_ANNOTATIONS.items()),
    ]
    return tuple(
        PodGroupReference(field=field, api_group=api_group, name=name) for field, api_group, name in found if name
    )


def gang_of(pod: PodRequest) -> Gang | None:
    """The pod's gang. None: it is in no gang. Raises InvalidField for invalid annotations, and for two different names."""
    names = {each.field: each.name for each in pod.pod_groups}
    size = pod.annotations.get(GANG_SIZE)
    is_annotated = GANG in pod.annotations or size is not None
    if is_annotated:
        names[annotation_path(GANG)] = pod.annotations.get(GANG, "")
    if not names:
        return None
    (first, name), *others = names.items()
    for field, other in names.items():
        if not NAME.fullmatch(other):
            finding = f"{quoted([other])} is not a name" if other else "is missing"
            raise InvalidField(field, finding, "use lower-case letters, digits, `-` and `.`")
    for field, other in others:
        if other != name:
            raise InvalidField(field, f"is {quoted([other])}, but {first} is {quoted([name])}", "name one group")
    if is_annotated and (size is None or not SIZE.fullmatch(size)):
        finding = "is missing" if size is None else f"{quoted([size])} is not a number of pods"
        raise InvalidField(annotation_path(GANG_SIZE), finding, "write how many pods the gang has, 1 to 9999")
    api_groups = tuple(dict.fromkeys(each.api_group for each in pod.pod_groups))
    return Gang(name=f"{pod.namespace}/{name}", size=None if size is None else int(size), api_groups=api_groups)


def annotation_path(key: str) -> str:
    """The path of a pod's annotation, for error messages."""
    return f"metadata.annotations[{key}]"
