"""
Decodes the arguments of kube-scheduler's calls from JSON.

Keys are spelled as kube-scheduler spells them (`NodeNames`). Other keys are ignored, as in Go. A repeated key is refused,
because decoders differ in which one counts.

Only a node's name and labels, and a pod's requests, are decoded. Whole nodes are kept as bytes, because the answer returns
them unchanged. The number of nodes is limited before they are decoded, because millions of nodes would fill the memory.
Names are limited to `MOST_NODES` commas. Whole nodes contain further commas, so a call with more commas is refused only
if it also has fewer than `LEAST_PER_COMMA` bytes per comma.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, field

from topoalign.core.model.errors import InvalidField, Undecodable, clean
from topoalign.core.model.ids import NodeName
from topoalign.kubelet.files import manifest
from topoalign.registry.scheduling import scheduling_api
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, Victims
from topoalign.runtime.replies import refuse_ambiguous

MOST_NODES = 20_000
"""Four times the largest supported Kubernetes cluster."""
LARGEST_NAMES = MOST_NODES * 256
"""Bytes of `MOST_NODES` names of 253 characters, with quotes and commas."""
LEAST_PER_COMMA = 16
"""Minimum number of bytes per comma in whole nodes: a real node has about 30, a list of empty items 2."""


class TooManyNodes(InvalidField):
    """Raised for a call with more than `MOST_NODES` nodes."""

    code = "InvalidField"

    def __init__(self, field: str) -> None:
        super().__init__(
            field, f"more than {MOST_NODES} nodes", "send only nodes of the cluster, as kube-scheduler does"
        )


S = TypeVar("S", bound=msgspec.Struct)
V = TypeVar("V", bound="MetaVictims | WholeVictims")

NULL = Raw(b"null")
LARGEST_POD = 1_000_000
"""Bytes. An API server stores objects of up to 1.5 MiB, with annotations of up to 256 KiB in total."""
REMEMBERED = 512
"""Number of cached pods. The bytes of a pod are the same in filter, prioritize and most retries."""
LARGEST_REMEMBERED = 16 * 1024
"""Maximum bytes of a cached pod, so that all take at most 8 MiB. A simple pod has one KiB."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of filter and prioritize, as kube-scheduler spells them."""

    pod: Raw = field(name="Pod", default=NULL)
    nodes: Raw = field(name="Nodes", default=NULL)
    node_names: Raw = field(name="NodeNames", default=NULL)


class PreemptArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of preempt. Victims are UIDs, or whole pods if nodeCacheCapable is false."""

    pod: Raw = field(name="Pod", default=NULL)
    victims: Raw = field(name="NodeNameToVictims", default=NULL)
    meta_victims: Raw = field(name="NodeNameToMetaVictims", default=NULL)


class BindArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of bind."""

    pod_name: str = field(name="PodName", default="")
    pod_namespace: str = field(name="PodNamespace", default="")
    pod_uid: str = field(name="PodUID", default="")
    node: NodeName = field(name="Node", default=NodeName(""))


class MetaPod(msgspec.Struct, frozen=True, kw_only=True):
    """A victim by its UID."""

    uid: str = field(name="UID")


class MetaVictims(msgspec.Struct, frozen=True, kw_only=True):
    """The victims of a node by their UIDs."""

    pods: list[MetaPod] | None = field(name="Pods", default=None)
    disruptions: int = field(name="NumPDBViolations", default=0)


class ObjectMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The relevant metadata of an object."""

    name: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """A Node, or a Pod that is a victim."""

    metadata: ObjectMetadata = ObjectMetadata()

    @property
    def uid(self) -> str:
        """The UID, as in `MetaPod`."""
        return self.metadata.uid


class WholeVictims(msgspec.Struct, frozen=True, kw_only=True):
    """The victims of a node as whole pods."""

    pods: list[Object] | None = field(name="Pods", default=None)
    disruptions: int = field(name="NumPDBViolations", default=0)


class RawNodeList(msgspec.Struct, frozen=True, kw_only=True):
    """Whole nodes, undecoded."""

    items: list[Raw] | None = None


class ExtenderCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of filter or prioritize: the pod and the nodes."""

    pod: bytes
    """The pod's JSON, for `read_called_pod`."""
    nodes: Sequence[NodeName]
    labels: Mapping[NodeName, Mapping[str, str]] = {}
    """Whole node -> its labels."""
    whole: Mapping[NodeName, Raw] | None = None
    """Node -> its JSON. None: the call has only names of nodes."""


def read_arguments(body: bytes) -> ExtenderCall:
    """Decodes a call of filter or prioritize. Raises Undecodable, and InvalidField for no or too many nodes."""
    arguments = decode_arguments(body, Arguments)
    raw_names = bytes(arguments.node_names)
    if len(raw_names) > LARGEST_NAMES or raw_names.count(b",") >= MOST_NODES:
        raise TooManyNodes("NodeNames")
    names = typed(arguments.node_names, list[NodeName] | None, "NodeNames")
    if names is not None:
        return ExtenderCall(pod=bytes(arguments.pod), nodes=names)
    raw_nodes = bytes(arguments.nodes)
    commas = raw_nodes.count(b",")
    if commas >= MOST_NODES and commas * LEAST_PER_COMMA > len(raw_nodes):
        raise TooManyNodes("Nodes.items")
    listed = typed(arguments.nodes, RawNodeList | None, "Nodes")
    if listed is None:
        raise InvalidField(
            "NodeNames", "neither NodeNames nor Nodes is given", "send one of them, as kube-scheduler does"
        )
    if len(listed.items or ()) > MOST_NODES:
        raise TooManyNodes("Nodes.items")
    whole: dict[NodeName, Raw] = {}
    labels: dict[NodeName, Mapping[str, str]] = {}
    for item in listed.items or ():
        metadata = typed(item, Object, "Nodes.items").metadata
        name = NodeName(metadata.name)
        if not name or name in whole:
            raise InvalidField("Nodes.items", "a node without a unique name", "send each node once")
        whole[name] = item
        labels[name] = metadata.labels or {}
    return ExtenderCall(pod=bytes(arguments.pod), nodes=tuple(whole), labels=labels, whole=whole)


def read_preempt(body: bytes) -> tuple[bytes, dict[NodeName, Victims]]:
    """Decodes a call of preempt: the pod, and the victims of each node. Raises Undecodable and TooManyNodes."""
    arguments = decode_arguments(body, PreemptArguments)
    found: Mapping[NodeName, MetaVictims | WholeVictims | None] | None
    found = decode_victims(arguments.meta_victims, MetaVictims, "NodeNameToMetaVictims")
    if found is None:
        found = decode_victims(arguments.victims, WholeVictims, "NodeNameToVictims") or {}
    if len(found) > MOST_NODES:
        raise TooManyNodes("NodeNameToMetaVictims")
    victims = {
        node: Victims(
            uids=tuple(pod.uid for pod in (each and each.pods) or ()), disruptions=each.disruptions if each else 0
        )
        for node, each in found.items()
    }
    return bytes(arguments.pod), victims


def read_bind(body: bytes) -> BindArguments:
    """Decodes a call of bind. Raises Undecodable, and InvalidField for a missing name."""
    arguments = decode_arguments(body, BindArguments)
    for each in msgspec.structs.fields(BindArguments):
        if not getattr(arguments, each.name):
            raise InvalidField(each.encode_name, "is missing", "send it, as kube-scheduler does")
    return arguments


def read_called_pod(body: bytes) -> PodToSchedule:
    """Decodes the pod of a call, from a cache if it is small. Raises InvalidField for an invalid pod."""
    return (remembered if len(body) <= LARGEST_REMEMBERED else parse_pod)(body)


def parse_pod(body: bytes) -> PodToSchedule:
    """Decodes the pod of a call without a cache."""
    if len(body) > LARGEST_POD:
        raise InvalidField("Pod", f"{len(body)} bytes, more than {LARGEST_POD}", "make its annotations smaller")
    try:
        refuse_ambiguous(body)
        pod = msgspec.json.decode(body, type=manifest.PodManifest | None)
    except (msgspec.MsgspecError, RecursionError, Undecodable) as error:
        raise InvalidField("Pod", clean(str(error), 200), manifest.REMEDY) from error
    uid = pod and pod.metadata and pod.metadata.uid
    if pod is None or not uid:
        raise InvalidField("Pod.metadata.uid", "there is none", "send the pod as the API server has it")
    return scheduling_api.pod_to_schedule(uid, pod)


remembered = lru_cache(REMEMBERED)(parse_pod)


def decode_arguments(body: bytes, kind: type[S]) -> S:
    """Decodes the body as this type. Raises Undecodable, also for a repeated key of the outermost object."""
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check skipped values
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable("the body", clean(str(error), 200)) from error
    # Only the outermost keys are checked, because a check of thousands of nodes takes 50 ms per MiB.
    for name in kind.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, Raw) and value != NULL:
            body = body.replace(bytes(value), b"0", 1)
    refuse_ambiguous(body)
    return found


def decode_victims(raw: Raw, kind: type[V], what: str) -> dict[NodeName, V | None] | None:
    """Decodes the victims of all nodes. Raises Undecodable, also for a repeated key."""
    # mypy does not accept `kind`, which is a value, as a type.
    found: dict[NodeName, V | None] | None = typed(raw, dict[NodeName, kind | None] | None, what)  # type: ignore[valid-type]
    if msgspec.json.encode(found) != bytes(raw):  # it has other keys, or a key twice
        refuse_ambiguous(bytes(raw))
    return found


def typed(raw: Raw, kind: Any, what: str) -> Any:
    """Decodes a value of this type. Raises Undecodable."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Undecodable(what, clean(str(error), 200)) from error
