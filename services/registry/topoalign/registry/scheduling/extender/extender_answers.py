"""
Encodes the answers to kube-scheduler's calls as JSON in Go's spelling.

A node is in at most one map, because the text in the second map would replace the first. A node in a preempt answer
always has victims: null would crash kube-scheduler, and an empty list would make it discard the whole answer. Scores
are integers, because it also discards an answer with `9.0`.

kube-scheduler groups nodes by the refusal text, joins the groups by commas, and writes the result to the pod's events and
its condition PodScheduled. The write requeues the pod. So a text that differs from call to call causes a loop of calls:
2,143 in 25 s for one pod. Therefore each code has one constant text, `Code: finding; remedy`, without numbers, names,
times and commas. If the pod would not fit even after other pods end, the text has another constant end for each reason
(`NodeRefusal.resolvability`). `topoalign why` shows the details. The text for an invalid pod names the field.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import field

from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.extender.arguments import ExtenderCall, MetaPod, MetaVictims
from topoalign.registry.scheduling.scheduling_api import Filtered, Victims
from topoalign.runtime.recent_dict import RecentDict

OTHER = "would refuse the pod; ask topoalign why"
"""The text after an unknown code, for example from a newer node."""
UNANSWERED = "no answer at present; wait or look at the log of the registry"
"""The text after the code of a temporary error."""

LONGEST = 400
"""Maximum characters of a finding and of a remedy, because an Event is cut at 1,024 bytes."""

FINDINGS: Mapping[str, str] = {
    # amounts
    "NotEnoughDevices": "too few free devices; wait until pods end or ask for fewer",
    "NoHealthyDevice": "no healthy device; look at topoalign doctor on the node",
    "TooLarge": "more devices than a node of this type has; ask for fewer",
    "DevicesDoNotFit": "no free devices as the annotations ask; ease the annotations or wait until pods end",
    "ShareSplit": "too few GPUs have what is asked for at once; wait until pods end or ease amounts and annotations",
    "WholeGpuInUse": "a whole GPU of which others have parts; wait until pods end",
    "MemoryAboveGpu": "more memory than a GPU has; ask for less",
    "NoGpuAccepted": "no GPU that may be chosen; ease the lists in metadata.annotations or look at topoalign gpu list",
    "NotEnoughShareGpus": "fewer GPUs than asked; ask for fewer GPUs",
    "NotEnoughUnusedGpus": "too few unused GPUs; wait until pods end or ask for fewer",
    "NotEnoughShareCores": "too few cores of a GPU left; wait until pods end or ask for less",
    "NotEnoughShareMemory": "too little memory of a GPU left; wait until pods end or ask for less",
    "NotEnoughShareSlots": "no slot of a GPU left; wait until pods end or ask for fewer",
    "ShareDoesNotFit": "no share of a GPU left; wait until pods end or ask for less",
    "NotEnoughCpus": "too few free exclusive CPUs; wait until pods end or ask for fewer",
    "NotEnoughCores": "too few free whole cores; wait until pods end or ask for fewer CPUs",
    "NotEnoughMemory": "too little free memory on the NUMA nodes; wait until pods end or ask for less",
    # alignment
    "NotAligned": "resources are free but not aligned as the topology policy asks; wait until pods end or ask for less",
    "MemoryNotPreferred": "memory is free but spread over too many NUMA nodes; wait until pods end or ask for less",
    "MemoryNotExtendable": "memory of the aligned NUMA nodes is too small; ask for less memory",
    "MemoryExtensionNotPreferred": "memory would need more NUMA nodes than the policy allows; ask for less memory",
    "MemoryGroupsWouldMix": "memory would mix groups of NUMA nodes that other pods use; wait until pods end",
    "NotWholeCores": "whole cores only; ask for CPUs in multiples of the threads per core",
    "SplitCore": "a core would be split; ask for CPUs in multiples of the threads per core",
    "OverQuota": "the quota of the namespace for parts of GPUs is used up; wait until its pods end or raise the quota",
    # what the node does not offer
    "InvalidShare": "not a share of a GPU; ask for amounts that a GPU has and for one where annotations choose GPUs",
    "UnknownResource": "a resource that the node does not offer; correct the name or label the nodes",
    "SharesNeedUnits": "no GPU in units of which a part could be; offer GPUs in units or ask for whole ones",
    # unknown data, and settings with which a kubelet would not start
    "KubeletUnknown": "the rules of the kubelet are not known; look at the allocator of the node",
    "TopologyUnknown": "the hardware is not known; look at the discovery of the node",
    "HardwareUnknown": "the hardware is not known; look at the discovery of the node",
    "DevicesUnknown": "the devices of other plugins are not known; look at the allocator of the node",
    "MemoryUnknown": "the memory of the NUMA nodes is not known; look at the discovery of the node",
    "DistancesUnknown": "the distances of the NUMA nodes are not known; look at the discovery of the node",
    "NumaIdsSparse": "the kubelet panics over the ids of the NUMA nodes; switch prefer-closest-numa-nodes off there",
    "HugepagesUnevenlyKnown": "hugepages are known of some NUMA nodes only; look at the discovery of the node",
    "KubeletWouldNotStart": "a kubelet would not start with these rules on the node; correct its configuration",
    "TooManyNumaNodes": "more NUMA nodes than the kubelet takes; raise max-allowable-numa-nodes",
    "TooMuchWork": "the search for an alignment is too long; ask for fewer kinds of resources",
    "PreferenceFailed": "the device plugin gave no preference; look at the allocator of the node",
    "PodHasAllocations": "a pod of this name still holds devices; wait until it has gone",
    "DeviceInUse": "a device that is asked for is in use; wait until its pod ends",
    # the node as a whole
    "UnknownNode": "nothing is known of the node; look whether topoalign runs on it",
    "NodeStale": "the allocator of the node does not answer; look whether topoalign runs on it",
    "NodeNotWhole": "not all of the node is known yet; wait or look at topoalign doctor on the node",
    "DuplicateAgent": "two allocators publish for the node; stop one of them",
    "ForeignNode": "HAMi gives out its GPUs; leave the pod to the scheduler of HAMi or move the node to topoalign",
    "ContestedNode": "HAMi and topoalign both give out its GPUs; stop one of them and delete what HAMi wrote",
    "PlannedElsewhere": "the pod is planned to another node with its gang; wait",
    "GangFirst": "pods of a gang that are planned to the node would not fit any more; wait until they run",
    "GangWaits": "the gang cannot start as a whole now; wait until pods end or all of its pods are there",
    # binds
    "NoKubernetes": "the registry has no access to Kubernetes; leave bindVerb out or give it access",
    "NodeRefuses": "the node would refuse the pod although the registry expected it to fit; the scheduler tries again",
    "NodeNotAllowed": "Kubernetes keeps the pod off the node; look at its cordon and taints and at the affinity of the pod",
    "OtherScheduler": "the pod names another scheduler; leave it to that one",
    "PodsPending": "other pods of the node come first; the scheduler tries again",
    "VictimsTerminating": "the node does not show yet that preempted pods are gone; the scheduler tries again",
    "PodGone": "the pod is gone or another one has its name; nothing is to be done",
    "BoundElsewhere": "the pod is bound to another node; nothing is to be done",
    "BindUnknown": "not known in time whether the pod is bound; the scheduler tries again",
    "ApiConflict": "the pod has changed meanwhile; the scheduler tries again",
    "ApiUnavailable": "the API server does not answer; look at the API server",
    "ApiRefused": "the API server refuses the request; look at the permissions of the registry",
    "BusUnavailable": "the bus or the allocator of the node does not answer; look at NATS and the node",
    # the pod
    "InvalidField": "the pod asks for something that cannot be meant; correct its resources and annotations",
}
"""Code -> finding and remedy."""

CAUSES: Mapping[Resolvability, str] = {
    Resolvability.NEVER: "even on an empty node; the pod never fits so ask topoalign why",
    Resolvability.UNHEALTHY: "as devices are unhealthy or cordoned; look at topoalign topo",
}
"""The text instead of a remedy to wait."""


@lru_cache(maxsize=512)
def refusal_text(code: str, resolvability: Resolvability | None = None) -> str:
    """The constant text of a refusal with this code and `NodeRefusal.resolvability`."""
    text = FINDINGS.get(code, OTHER)
    finding, _, remedy = text.partition("; ")
    cause = CAUSES.get(resolvability) if resolvability is not None else None
    return f"{code}: {finding} {cause}" if cause is not None and "wait" in remedy else f"{code}: {text}"


def text_of_error(code: str) -> str:
    """The text of an error with this code, if it is unknown whether a node would refuse the pod."""
    return f"{code}: {FINDINGS.get(code, UNANSWERED)}"


VICTIMS_COUNT_FROM = (1, 38)
"""
The first version of Kubernetes that calls preempt for nodes in FailedNodes. Earlier versions preempt no pods there, and
write a different error at each attempt, which requeues the pod: 775 calls in 10 s.
"""

RENDERED_KEPT = 16
"""Number of cached answers. One for 1,000 nodes has 0.1 MB."""


class NodeListAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whole nodes, as received."""

    metadata: dict[str, str] = {}
    items: list[msgspec.Raw]


class FilterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to filter: nodes in the form of the call, and a text for each refused one."""

    nodes: NodeListAnswer | None = field(name="Nodes", default=None)
    node_names: Sequence[NodeName] | None = field(name="NodeNames", default=None)
    failed: Mapping[NodeName, str] = field(name="FailedNodes", default={})
    unresolvable: Mapping[NodeName, str] = field(name="FailedAndUnresolvableNodes", default={})
    error: str = field(name="Error", default="")


class Score(msgspec.Struct, frozen=True, gc=False):
    """The score of a node, in the answer to prioritize."""

    host: NodeName = field(name="Host")
    score: int = field(name="Score")


def filter_answer(asked: ExtenderCall, filtered: Filtered, kubernetes: tuple[int, int]) -> bytes:
    """Encodes the answer to filter. `kubernetes`: the scheduler's version, major and minor."""
    helps = kubernetes >= VICTIMS_COUNT_FROM
    failed: dict[NodeName, str] = {}
    unresolvable: dict[NodeName, str] = {}
    for node, refusal in filtered.refused.items():
        (failed if helps and refusal.helped_by_victims else unresolvable)[node] = refusal_text(
            refusal.code, refusal.resolvability
        )
    if asked.whole is None:
        return encode(FilterAnswer(node_names=filtered.passed, failed=failed, unresolvable=unresolvable))
    whole = NodeListAnswer(items=[asked.whole[node] for node in filtered.passed])
    return encode(FilterAnswer(nodes=whole, failed=failed, unresolvable=unresolvable))


class RenderedRefusals:
    """Caches the bytes of answers in which all nodes refuse: all pending pods of a class get the same answer."""

    def __init__(self) -> None:
        self._rendered = RecentDict[int, tuple[Filtered, bool, tuple[int, int], bytes]](RENDERED_KEPT)
        """id() of an answer -> the answer, for comparison, and its bytes."""

    def answer(self, asked: ExtenderCall, filtered: Filtered, kubernetes: tuple[int, int]) -> bytes:
        """As `filter_answer`, from the cache if the same object was encoded before."""
        known = self._rendered.get(id(filtered))
        named = asked.whole is None
        if known is not None and known[:3] == (filtered, named, kubernetes):
            return known[3]
        answer = filter_answer(asked, filtered, kubernetes)
        self._rendered[id(filtered)] = filtered, named, kubernetes, answer
        return answer


def refuse_all(asked: ExtenderCall, error: TopoalignError) -> bytes:
    """Encodes the answer to filter for an invalid pod: no node admits it, and a retry does not help."""
    text = refusal_text(error.code)  # constant, unlike a finding with the used part of a quota
    if error.finding.startswith(("spec", "metadata")):
        text = f"{error.code}: {clean(error.finding, LONGEST)}; {clean(error.remedy, LONGEST)}"
    texts = dict.fromkeys(asked.nodes, text)
    if asked.whole is None:
        return encode(FilterAnswer(node_names=[], unresolvable=texts))
    return encode(FilterAnswer(nodes=NodeListAnswer(items=[]), unresolvable=texts))


def preempt_answer(victims: Mapping[NodeName, Victims]) -> bytes:
    """Encodes the nodes that have victims, with the UIDs of the victims."""
    helped = {
        node: MetaVictims(pods=[MetaPod(uid=uid) for uid in each.uids], disruptions=each.disruptions)
        for node, each in victims.items()
        if each.uids
    }
    return encode({"NodeNameToMetaVictims": helped})


encode = msgspec.json.Encoder().encode
