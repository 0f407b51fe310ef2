"""
The types between the extender protocol and the decisions: a pod to schedule, refusals and victims.

A user can write 256 KiB of annotations, and a registry stores thousands of pending pods. So it stores only the
annotations that affect a pod's devices or gang, or that cause a refusal. A pod with more than 32 KiB of them is
refused. For comparison, a list of 256 UUIDs has 11 kB.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from topoalign.core.demand.gangs import GROUP_ANNOTATIONS, GROUP_LABEL
from topoalign.core.demand.node_filters import Constraints
from topoalign.core.demand.share_annotations import OF_PODS
from topoalign.core.deviceshare.demand import OWN_DOMAIN
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS, DEVICE_PREFIX
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.kubelet.files import manifest

PODS_PENDING = "PodsPending"
"""The code of a temporary refusal, because of other pods of the node or because data is missing."""


class PodToSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the scheduler sends it."""

    uid: str
    """UID of the pod. It changes if a pod is created again with the same name."""
    request: PodRequest
    """Its names, requests and annotations, which are not trusted."""
    constraints: Constraints = Constraints()
    """The nodes that Kubernetes allows for it. The scheduler calls the extender only for these nodes."""
    nominated: NodeName | None = None
    """`status.nominatedNodeName`: the node on which it has preempted other pods. None: it has preempted none."""


class NodeRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node would not admit a pod."""

    code: str
    """Stable code of the reason: `NotAligned`, `NotEnoughDevices`."""
    helped_by_victims: bool = False
    """Whether the pod could fit if other pods were preempted."""
    resolvability: Resolvability | None = None
    """`never`, `unhealthy`: it does not fit even after other pods end. None: it may fit, or this was not checked."""

    @property
    def label(self) -> str:
        """The code, with a note if the pod does not fit even after other pods end: `NotAligned (never fits)`."""
        return f"{self.code} ({LABELS[self.resolvability]})" if self.resolvability in LABELS else self.code


LABELS: Mapping[Resolvability | None, str] = {
    Resolvability.NEVER: "never fits",
    Resolvability.UNHEALTHY: "unhealthy devices",
}


class Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions about a pod for the nodes of a call. Each node is in one of the two fields."""

    passed: Sequence[NodeName]
    """In the order of the call."""
    refused: Mapping[NodeName, NodeRefusal]
    """Node -> why it does not admit the pod."""


class Victims(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one node that a preemption would delete."""

    uids: tuple[str, ...]
    disruptions: int = 0
    """PodDisruptionBudgets that would be violated, as the scheduler counts them."""


Bind = Callable[[str, str, str, NodeName], Coroutine[Any, Any, None]]
"""
Binds the pod of this namespace, name and UID to the node; on return, the Binding exists. Ends well within the five
seconds after which a scheduler retries. Raises a TopoalignError if the Binding was not created, or this is unknown.
"""

MOST_CHARACTERS = 32 * 1024
"""Maximum length of the relevant annotations, including their keys."""
NAMED = frozenset((*ANNOTATIONS, *OF_PODS, *GROUP_ANNOTATIONS))
BEGINNINGS = (OWN_DOMAIN, DEVICE_PREFIX)
"""Prefixes of keys about devices. Unknown keys with these prefixes are refused, because they may be misspelled."""


def relevant_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """The relevant annotations, cut after `MOST_CHARACTERS` + 1 characters, so that too many can still be noticed."""
    found: dict[str, str] = {}
    remaining = MOST_CHARACTERS + 1
    for key, value in annotations.items():
        if key in NAMED or key.startswith(BEGINNINGS):
            found[key] = value[: max(remaining - len(key), 0)]
            remaining -= len(key) + len(value)
            if remaining <= 0:
                break
    return found


def with_relevant_annotations(request: PodRequest) -> PodRequest:
    """The request with only its relevant annotations. Raises InvalidField for more than `MOST_CHARACTERS`."""
    kept = relevant_annotations(request.annotations)
    if sum(map(len, (*kept, *kept.values()))) > MOST_CHARACTERS:
        finding = f"more than {MOST_CHARACTERS} characters about devices"
        raise InvalidField("metadata.annotations", finding, "shorten the lists of types and uuids")
    return msgspec.structs.replace(request, annotations=kept)


def pod_to_schedule(uid: str, pod: manifest.PodManifest) -> PodToSchedule:
    """The pod with its relevant annotations. Raises InvalidField for an invalid pod."""
    request = with_relevant_annotations(manifest.request_from_pod(pod))
    nominated = pod.status and pod.status.nominated_node_name
    return PodToSchedule(
        uid=uid,
        request=request,
        constraints=manifest.constraints_of(pod),
        nominated=NodeName(nominated) if nominated else None,
    )


def drop_irrelevant_metadata(pod: manifest.PodManifest) -> manifest.PodManifest:
    """The manifest with only its relevant label and annotations, these cut as by `relevant_annotations`."""
    if pod.metadata is None:
        return pod
    kept = relevant_annotations({key: value or "" for key, value in (pod.metadata.annotations or {}).items()})
    labels = {key: value for key, value in (pod.metadata.labels or {}).items() if key == GROUP_LABEL}
    return msgspec.structs.replace(
        pod, metadata=msgspec.structs.replace(pod.metadata, annotations=dict(kept), labels=labels)
    )
