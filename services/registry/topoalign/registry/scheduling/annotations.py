"""
Which annotations of a pod the registry keeps: those by which its devices or its gang are decided, or by which it is refused.

A tenant may write 256 KiB of annotations, and a registry keeps thousands of pods that wait. The others are left out where a
pod comes in, and a pod with more than 32 KiB that count is refused: a list of 256 uuids has 11 kB.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.demand.hami_names import OF_PODS
from topoalign.core.deviceshare.demand import OWN_DOMAIN
from topoalign.core.deviceshare.names import ANNOTATIONS, DEVICE_PREFIX
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.kubelet.files import manifest
from topoalign.registry.scheduling.model import PodToSchedule

MOST_CHARACTERS = 32 * 1024
"""Of the annotations that count, their keys included."""
NAMED = frozenset((*ANNOTATIONS, *OF_PODS))
BEGINNINGS = (OWN_DOMAIN, DEVICE_PREFIX)
"""Of keys that are ours, or are refused as misspelled."""


def counting(annotations: Mapping[str, str]) -> dict[str, str]:
    """Those that count; of more than `MOST_CHARACTERS` the first ones, up to one character more."""
    found: dict[str, str] = {}
    left = MOST_CHARACTERS + 1
    for key, value in annotations.items():
        if key in NAMED or key.startswith(BEGINNINGS):
            found[key] = value[: max(left - len(key), 0)]
            left -= len(key) + len(value)
            if left <= 0:
                break
    return found


def with_counting(request: PodRequest) -> PodRequest:
    """The same request with no other annotations. Raises InvalidField for more than `MOST_CHARACTERS`."""
    kept = counting(request.annotations)
    if sum(map(len, (*kept, *kept.values()))) > MOST_CHARACTERS:
        finding = f"more than {MOST_CHARACTERS} characters about devices"
        raise InvalidField("metadata.annotations", finding, "shorten the lists of types and uuids")
    return msgspec.structs.replace(request, annotations=kept)


def read_pod(uid: str, pod: manifest.Pod) -> PodToSchedule:
    """A pod, of its annotations those that count. Raises InvalidField for one that cannot be meant."""
    request = with_counting(manifest.request_of(pod))
    nominated = pod.status and pod.status.nominated_node_name
    return PodToSchedule(
        uid=uid,
        request=request,
        constraints=manifest.constraints_of(pod),
        nominated=NodeName(nominated) if nominated else None,
    )


def without_others(pod: manifest.Pod) -> manifest.Pod:
    """The same pod with no other annotations, unread; with too many if it had too many."""
    if pod.metadata is None or not pod.metadata.annotations:
        return pod
    kept = counting({key: value or "" for key, value in pod.metadata.annotations.items()})
    return msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, annotations=dict(kept)))
