"""What the scheduler asks about a pod, and what it is told: the types between the protocol and the decision."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

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
"""What `fits` answers where it cannot be told yet: this passes by itself."""


class PodToSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the scheduler shows it."""

    uid: str
    """UID of the pod: a pod that is created again under its name is another one."""
    request: PodRequest
    """Its names, what its containers ask for, and its annotations, which are not trusted."""
    constraints: Constraints = Constraints()
    """To which nodes it may go. The scheduler asks about no others."""
    nominated: NodeName | None = None
    """`status.nominatedNodeName`: the node on which it has preempted others. None: it has not."""


class NodeRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node would not admit a pod."""

    code: str
    """Stable code of the reason: `NotAligned`, `NotEnoughDevices`."""
    helped_by_victims: bool = False
    """Whether the pod could fit if others were gone."""
    resolvability: Resolvability | None = None
    """`never` and `unhealthy`: the end of other pods does not help. None: it may help, or it was not looked for."""

    @property
    def label(self) -> str:
        """The code, with what becomes of the node where the end of other pods does not help: `NotAligned (never fits)`."""
        return f"{self.code} ({LABELS[self.resolvability]})" if self.resolvability in LABELS else self.code


LABELS: Mapping[Resolvability | None, str] = {
    Resolvability.NEVER: "never fits",
    Resolvability.UNHEALTHY: "unhealthy devices",
}


class Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """Which of some nodes would admit a pod: each is in one of the two."""

    passed: Sequence[NodeName]
    """In the order in which they were asked about."""
    refused: Mapping[NodeName, NodeRefusal]
    """Node -> why not."""


class Victims(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one node that a preemption would delete."""

    uids: tuple[str, ...]
    """Their UIDs."""
    disruptions: int = 0
    """PodDisruptionBudgets that would be violated, as the scheduler counts them."""


class Scheduling(Protocol):
    """What the scheduler's protocol asks of the registry."""

    async def prepare(self, pod: PodToSchedule) -> None:
        """
        Does what a `filter` or `prioritize` that follows would take long for, with turns of the event loop in between. What
        is done stays done where this is cancelled. Raises as `filter` does.
        """

    def filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        """
        Which of these nodes would admit the pod, without any effect. `labels`: those of nodes that came as whole objects, by
        which a node is judged that the registry does not know (a node that an autoscaler would add).

        Raises InvalidField for a pod that cannot be meant.
        """

    def prioritize(self, pod: PodToSchedule, nodes: Sequence[NodeName]) -> Sequence[int]:
        """A score of 0 to 10 for each of these nodes, in their order. Raises InvalidField as `filter` does."""

    async def preempt(self, pod: PodToSchedule, victims: Mapping[NodeName, Victims]) -> Mapping[NodeName, Victims]:
        """
        Those of the nodes that would admit the pod if these victims were gone; none that would not. With turns of the event
        loop, as `prepare`.

        Raises InvalidField as `filter` does.
        """

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """
        Binds the pod to the node; when this returns the Binding exists. Returns or raises well within the five seconds after
        which a scheduler tries again.

        Raises a TopoalignError where it was not made, or it is not known that it was.
        """


# Which annotations of a pod the registry keeps: those by which its devices or its gang are decided, or by which it is
# refused.
#
# A tenant may write 256 KiB of annotations, and a registry keeps thousands of pods that wait. The others are left out
# where a pod comes in, and a pod with more than 32 KiB that count is refused: a list of 256 uuids has 11 kB.


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
