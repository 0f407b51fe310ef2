"""
Decodes the needed fields of pods, nodes and quotas of the API server.

A missing or null field gets its default. An object with an invalid field raises Undecodable.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol, TypeVar

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
    PodEvent,
    SeenNode,
    SeenPod,
    SeenPodGroup,
    SeenQuota,
)

T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)

WOKEN = "topoalign.io/woken"
"""Annotation of a node. Its change makes kube-scheduler retry pending pods."""
REPORTER = "topoalign"
MOST_NOTE_BYTES = 1024
"""The API server rejects longer notes."""


class ApiObject(Protocol[S_co]):
    """An object as the API server returns it."""

    def to_seen(self) -> S_co:
        """Returns the object for the registry."""


class OwnerReference(msgspec.Struct, frozen=True):
    """An entry of `metadata.ownerReferences`."""

    uid: str = ""
    controller: bool | None = None


class PodMetadata(manifest.ManifestMetadata, frozen=True, rename="camel"):
    """The needed fields of a pod's `metadata`."""

    uid: str = ""
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None


class PodSpec(manifest.ManifestSpec, frozen=True, kw_only=True, rename="camel"):
    """The needed fields of a pod's `spec`."""

    node_name: str | None = None
    scheduling_gates: list[Any] | None = None


class PodStatus(manifest.ManifestStatus, frozen=True, rename="camel"):
    """The needed fields of a pod's `status`."""

    phase: str | None = None
    reason: str | None = None
    resource_claim_statuses: list[manifest.ResourceClaim] | None = None


class ShownPod(manifest.PodManifest, frozen=True, kw_only=True):
    """A v1 Pod."""

    metadata: PodMetadata
    spec: PodSpec | None = None
    status: PodStatus | None = None

    def to_seen(self) -> SeenPod:
        """Returns the pod for the registry."""
        metadata = self.metadata
        spec = self.spec or PodSpec()
        status = self.status or PodStatus()
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
            content=self,
        )


def what_prevents_scheduling(spec: PodSpec, status: PodStatus) -> str:
    """
    Why no scheduler places the pod yet, as `SeenPod.waits_for`.

    Source: Kubernetes v1.36, plugins SchedulingGates and DynamicResources; API type PodResourceClaimStatus.
    """
    if spec.scheduling_gates:
        return "has scheduling gates"
    # A claim from a template has an entry in the status once it exists or is not needed. Claims that the pod names
    # directly are not checked.
    existing = {claim.name for claim in status.resource_claim_statuses or ()}
    missing = [
        claim.name
        for claim in spec.resource_claims or ()
        if claim.resource_claim_template_name and claim.name not in existing
    ]
    return f"waits for the resource claim {quoted(missing[:1])}" if missing else ""


class ObjectMetadata(msgspec.Struct, frozen=True):
    """The needed fields of the `metadata` of a node or a quota."""

    name: str
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: NodeAnnotations | None = None


class NodeSpec(msgspec.Struct, frozen=True):
    """The needed fields of a node's `spec`."""

    taints: tuple[Taint, ...] | None = None
    unschedulable: bool | None = None


class NodeStatus(msgspec.Struct, frozen=True):
    """The needed fields of a node's `status`."""

    allocatable: dict[str, str | int | None] | None = None


class ShownNode(msgspec.Struct, frozen=True):
    """A v1 Node."""

    metadata: ObjectMetadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None

    def to_seen(self) -> SeenNode:
        """Returns the node for the registry."""
        metadata = self.metadata
        spec = self.spec or NodeSpec()
        annotations = metadata.annotations
        allocatable = (self.status and self.status.allocatable) or {}
        return SeenNode(
            name=NodeName(metadata.name),
            uid=metadata.uid,
            labels=metadata.labels or {},
            taints=spec.taints or (),
            unschedulable=bool(spec.unschedulable),
            hami=None if annotations is None or annotations.register is None else annotations,
            allocatable_gpus=whole(str(allocatable.get(GPU) or 0)) or 0,
        )


class QuotaSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The needed fields of a quota's `spec`."""

    hard: dict[str, str | int | float] | None = None
    scopes: list[str] | None = None
    scope_selector: dict[str, Any] | None = None


class ShownQuota(msgspec.Struct, frozen=True):
    """A v1 ResourceQuota."""

    metadata: ObjectMetadata
    spec: QuotaSpec | None = None

    def to_seen(self) -> SeenQuota:
        """Returns the quota for the registry."""
        metadata = self.metadata
        spec = self.spec or QuotaSpec()
        return SeenQuota(
            namespace=metadata.namespace,
            name=metadata.name,
            uid=metadata.uid,
            limits=read_quota_limits(spec.hard or {}),
            scoped=bool(spec.scopes or spec.scope_selector),
        )


class GangPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """The field `spec.schedulingPolicy.gang` of a PodGroup."""

    min_count: int = 1


class SchedulingPolicy(msgspec.Struct, frozen=True):
    """The field `spec.schedulingPolicy` of a PodGroup. Without `gang`, the policy is `basic`."""

    gang: GangPolicy | None = None


class PodGroupSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The needed fields of the `spec` of any PodGroup."""

    scheduling_policy: SchedulingPolicy | None = None
    """Only in `scheduling.k8s.io`."""
    min_member: int | None = None
    """Only in the other API groups."""


class ShownPodGroup(msgspec.Struct, frozen=True):
    """
    A PodGroup.

    Source: `scheduling.k8s.io` v1alpha2 (Kubernetes v1.36) and v1beta1 (v1.37); `scheduling.x-k8s.io` v1alpha1
    (scheduler-plugins); `scheduling.run.ai` v2alpha2 (KAI Scheduler); `scheduling.volcano.sh` v1beta1 (Volcano).
    """

    metadata: ObjectMetadata
    spec: PodGroupSpec | None = None

    def to_seen(self) -> SeenPodGroup:
        """Returns the PodGroup for the registry."""
        spec = self.spec or PodGroupSpec()
        gang = (spec.scheduling_policy or SchedulingPolicy()).gang
        return SeenPodGroup(
            namespace=self.metadata.namespace,
            name=self.metadata.name,
            uid=self.metadata.uid,
            minimum=gang.min_count if gang is not None else spec.min_member,
        )


class ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of the `metadata` of a list or an object that a watch needs."""

    resource_version: str = ""
    next_page: str | None = msgspec.field(name="continue", default=None)


class AnyObject(msgspec.Struct, frozen=True):
    """An object of any kind."""

    metadata: ListMetadata


class ApiStatus(msgspec.Struct, frozen=True):
    """A v1 Status: why a request was refused."""

    code: int = 0
    reason: str = ""
    message: str = ""


def error_for_status(code: int, message: str) -> TopoalignError:
    """The port's error for an answer with this HTTP status."""
    if code in (408, 429) or code >= 500:
        return ApiUnavailable(f"HTTP status {code}: {message}")
    if code == 404:
        return ApiNotFound(message)
    return ApiConflict(message) if code == 409 else ApiRefused(f"HTTP status {code}: {message}")


def decode_object(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decodes an object of this type. Raises Undecodable."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Undecodable("an object of the API server", clean(str(error), 200)) from error


def binding(namespace: str, name: str, uid: str, node: NodeName) -> dict[str, Any]:
    """A v1 Binding of the pod with this UID."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


def event(report: PodEvent, instance: str, now: str) -> dict[str, Any]:
    """A v1 Event. `instance`: the replica that writes it; `now`: an RFC 3339 time."""
    note = report.note.encode()[:MOST_NOTE_BYTES].decode(errors="ignore")
    # The name is the same in all replicas, and a DNS subdomain of at most 253 characters.
    digest = sha256("\0".join(report.key).encode()).hexdigest()[:16]
    name = f"{report.name[:236].rstrip('-.')}.{digest}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": report.namespace},
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
    """A merge patch of a node, with this text as its annotation."""
    return {"metadata": {"annotations": {WOKEN: text}}}
