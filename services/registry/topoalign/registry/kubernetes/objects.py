"""
Reads pods, nodes and quotas as the API server shows them, and only the fields that are looked at.

A field that is missing or null has its default. An object that does not have the form of its kind is Undecodable; an API
server shows none, so whoever watches skips it.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, TypeVar

import msgspec

from topoalign.core.demand.node_filters import Taint
from topoalign.core.model.errors import TopoalignError, Undecodable, clean, quoted
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.sharing.hami.node_annotations import NodeAnnotations
from topoalign.kubelet.files import manifest
from topoalign.kubelet.files.manifest import read_quota_limits
from topoalign.kubelet.files.resource_quantities import whole
from topoalign.registry.ports import (
    ApiConflict,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    GoneNode,
    GonePod,
    GoneQuota,
    PodEvent,
    SeenNode,
    SeenPod,
    SeenQuota,
)

T = TypeVar("T")

WOKEN = "topoalign.io/woken"
"""Annotation of a node by which waiting pods are woken."""
REPORTER = "topoalign"
MOST_NOTE_BYTES = 1024
"""An API server takes no longer notes."""


class OwnerReference(msgspec.Struct, frozen=True):
    """An entry of `metadata.ownerReferences`."""

    uid: str = ""
    controller: bool | None = None


class PodMetadata(manifest.ManifestMetadata, frozen=True, rename="camel"):
    """The fields of a pod's `metadata` that are looked at."""

    uid: str = ""
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None


class PodSpec(manifest.ManifestSpec, frozen=True, kw_only=True, rename="camel"):
    """The fields of a pod's `spec` that are looked at."""

    node_name: str | None = None
    scheduling_gates: list[Any] | None = None


class PodStatus(manifest.ManifestStatus, frozen=True, rename="camel"):
    """The fields of a pod's `status` that are looked at."""

    phase: str | None = None
    reason: str | None = None
    resource_claim_statuses: list[manifest.ResourceClaim] | None = None


class ShownPod(manifest.PodManifest, frozen=True, kw_only=True):
    """A v1 Pod."""

    metadata: PodMetadata
    spec: PodSpec | None = None
    status: PodStatus | None = None


class NodeMetadata(msgspec.Struct, frozen=True):
    """The fields of a node's `metadata` that are looked at."""

    name: str
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: NodeAnnotations | None = None


class NodeSpec(msgspec.Struct, frozen=True):
    """The fields of a node's `spec` that are looked at."""

    taints: tuple[Taint, ...] | None = None
    unschedulable: bool | None = None


class Allocatable(msgspec.Struct, frozen=True):
    """The resources of a node's `status.allocatable` that are looked at."""

    gpus: str | int | None = msgspec.field(name=GPU, default=None)


class SeenNodeStatus(msgspec.Struct, frozen=True):
    """The fields of a node's `status` that are looked at."""

    allocatable: Allocatable | None = None


class ShownNode(msgspec.Struct, frozen=True):
    """A v1 Node."""

    metadata: NodeMetadata
    spec: NodeSpec | None = None
    status: SeenNodeStatus | None = None


class QuotaMetadata(msgspec.Struct, frozen=True):
    """The fields of a quota's `metadata` that are looked at."""

    name: str
    namespace: str
    uid: str = ""


class QuotaSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a quota's `spec` that are looked at."""

    hard: dict[str, str | int | float] | None = None
    scopes: list[str] | None = None
    scope_selector: dict[str, Any] | None = None


class ShownQuota(msgspec.Struct, frozen=True):
    """A v1 ResourceQuota."""

    metadata: QuotaMetadata
    spec: QuotaSpec | None = None


class ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a list's, or an object's, `metadata` that following needs."""

    resource_version: str = ""
    next_page: str | None = msgspec.field(name="continue", default=None)


class Versioned(msgspec.Struct, frozen=True):
    """Any object."""

    metadata: ListMetadata


class ApiStatus(msgspec.Struct, frozen=True):
    """A v1 Status: why a request was refused."""

    code: int = 0
    reason: str = ""
    message: str = ""


def seen_pod(shown: ShownPod) -> SeenPod:
    """The pod as the registry looks at it."""
    metadata = shown.metadata
    spec = shown.spec or PodSpec()
    status = shown.status or PodStatus()
    return SeenPod(
        namespace=metadata.namespace or "default",
        name=metadata.name or "",
        uid=metadata.uid,
        node=NodeName(spec.node_name) if spec.node_name else None,
        phase=status.phase or "",
        reason=status.reason or "",
        controller=next((owner.uid for owner in metadata.owner_references or () if owner.controller), ""),
        deleting=metadata.deletion_timestamp is not None,
        waits_for=what_prevents_scheduling(spec, status),
        content=shown,
    )


def what_prevents_scheduling(spec: PodSpec, status: PodStatus) -> str:
    """
    Why no scheduler places the pod yet, as `SeenPod.waits_for`. A claim that the pod names itself is not looked up. Of one
    that is made from a template the status has an entry once it exists, or is not needed.

    Source: Kubernetes v1.36, plugins SchedulingGates and DynamicResources; API type PodResourceClaimStatus.
    """
    if spec.scheduling_gates:
        return "has scheduling gates"
    existing = {claim.name for claim in status.resource_claim_statuses or ()}
    missing = [
        claim.name
        for claim in spec.resource_claims or ()
        if claim.resource_claim_template_name and claim.name not in existing
    ]
    return f"waits for the resource claim {quoted(missing[:1])}" if missing else ""


def seen_node(shown: ShownNode) -> SeenNode:
    """The node as the registry looks at it."""
    metadata = shown.metadata
    spec = shown.spec or NodeSpec()
    annotations = metadata.annotations
    allocatable = shown.status and shown.status.allocatable
    return SeenNode(
        name=NodeName(metadata.name),
        uid=metadata.uid,
        labels=metadata.labels or {},
        taints=spec.taints or (),
        unschedulable=bool(spec.unschedulable),
        hami=None if annotations is None or annotations.register is None else annotations,
        allocatable_gpus=(whole(str(allocatable.gpus or 0)) or 0) if allocatable else 0,
    )


def seen_quota(shown: ShownQuota) -> SeenQuota:
    """The quota as the registry looks at it."""
    metadata = shown.metadata
    spec = shown.spec or QuotaSpec()
    return SeenQuota(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        limits=read_quota_limits(spec.hard or {}),
        scoped=bool(spec.scopes or spec.scope_selector),
    )


def gone_pod(pod: SeenPod) -> GonePod:
    """What the pod is when it is gone."""
    return GonePod(namespace=pod.namespace, name=pod.name, uid=pod.uid)


def decode_seen_pod(raw: bytes | msgspec.Raw) -> tuple[SeenPod, GonePod]:
    """A pod, and what it is when it is gone. Raises Undecodable."""
    pod = seen_pod(decode_object(raw, ShownPod))
    return pod, gone_pod(pod)


def read_node(raw: bytes | msgspec.Raw) -> tuple[SeenNode, GoneNode]:
    """A node, and what it is when it is gone. Raises Undecodable."""
    node = seen_node(decode_object(raw, ShownNode))
    return node, GoneNode(name=node.name)


def read_quota(raw: bytes | msgspec.Raw) -> tuple[SeenQuota, GoneQuota]:
    """A quota, and what it is when it is gone. Raises Undecodable."""
    quota = seen_quota(decode_object(raw, ShownQuota))
    return quota, GoneQuota(uid=quota.uid)


def object_version(raw: msgspec.Raw) -> str:
    """Raises Undecodable."""
    return decode_object(raw, Versioned).metadata.resource_version


def error_for_status(code: int, message: str) -> TopoalignError:
    """The port's error for an answer with this HTTP status."""
    if code in (408, 429) or code >= 500:
        return ApiUnavailable(f"HTTP status {code}: {message}")
    if code == 404:
        return ApiNotFound(message)
    return ApiConflict(message) if code == 409 else ApiRefused(f"HTTP status {code}: {message}")


def decode_object(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises Undecodable."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Undecodable("an object of the API server", clean(str(error), 200)) from error


def binding(namespace: str, name: str, uid: str, node: NodeName) -> dict[str, Any]:
    """A v1 Binding of this very pod."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


def event_name(report: PodEvent) -> str:
    """The name of a report's Event, the same in all replicas; a DNS subdomain of at most 253 characters."""
    digest = sha256("\0".join(report.key).encode()).hexdigest()[:16]
    return f"{report.name[:236].rstrip('-.')}.{digest}"


def event(report: PodEvent, instance: str, now: str) -> dict[str, Any]:
    """A v1 Event; `instance` names the replica that writes it, `now` is the time as RFC 3339 has it."""
    note = report.note.encode()[:MOST_NOTE_BYTES].decode(errors="ignore")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event_name(report), "namespace": report.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": report.name,
            "namespace": report.namespace,
            "uid": report.uid,
        },
        "reason": report.reason,
        "message": note,
        "type": report.kind,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": REPORTER, "host": instance},
        "reportingComponent": REPORTER,
        "reportingInstance": instance,
    }


def woken(text: str) -> Mapping[str, Any]:
    """A merge patch of a node."""
    return {"metadata": {"annotations": {WOKEN: text}}}
