"""
The port to Kubernetes' API server: the objects that the registry reads, and the few that it writes.

`registry.kubernetes` has the adapter over HTTP, and topoalign-tools has one in memory for simulations
and tests. Both pass the same contract tests. An adapter does not store the watched objects; it only passes them on.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from topoalign.core.demand.node_filters import NodeTraits
from topoalign.core.model.errors import NoFit, TopoalignError, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.sharing.hami.node_annotations import NodeAnnotations
from topoalign.kubelet.files.manifest import ManifestSpec, PodManifest
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, pod_to_schedule

SUCCEEDED = "Succeeded"
FINISHED = (SUCCEEDED, "Failed")
"""Phases of a pod that no longer holds resources."""
DEFAULT_SCHEDULER = "default-scheduler"
"""The scheduler of pods without `schedulerName`."""


class ApiUnavailable(Unavailable):
    """Raised if the API server does not answer or reports a temporary failure. A write may have taken effect."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "check that the API server runs and can be reached from the registry")


class ApiRefused(Unavailable):
    """Raised if the API server denies permission or rejects the object."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "see which permissions deploy/kubernetes gives to the registry")


class ApiConflict(NoFit):
    """Raised if an object has changed since it was read: it is already bound, or another object has its name."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "read the object again and decide anew")


class ApiNotFound(TopoalignError):
    """
    Raised when Kubernetes has no such object.

    Remedy: None is needed: the object was deleted or never created.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "it was deleted, or never created: forget it")


class NotReadYet(Unavailable):
    """
    Raised while the registry has not read all data that an answer depends on.

    Remedy: Wait until the registry has read it; `/readyz` shows when.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "wait until the registry has read it; /readyz shows when")


class SeenPod(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a pod that the registry reads."""

    namespace: str
    name: str
    uid: str
    node: NodeName | None
    """The node to which it is bound; None: it is not bound yet."""
    phase: str
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    reason: str
    """`status.reason`. If its node refused the pod: `TopologyAffinityError`, `UnexpectedAdmissionError` or others."""
    controller: str
    """UID of the controller that owns it and would replace it after a deletion; empty: there is none."""
    deleting: bool
    """Whether it is being deleted; it holds its devices until it is gone."""
    waits_for: str = ""
    """Why no scheduler places it yet: `has scheduling gates`, or a claim that does not exist; empty: nothing prevents it."""
    content: PodManifest
    """The manifest. Its requests are parsed only when needed, because most changes of a pod do not affect them."""

    @property
    def key(self) -> str:
        """Identifies the pod in a watch."""
        return self.uid

    @property
    def finished(self) -> bool:
        """Whether all its containers have terminated and will not be restarted, or none was ever started."""
        return self.phase in FINISHED

    @property
    def has_succeeded(self) -> bool:
        """Whether all its containers have succeeded."""
        return self.phase == SUCCEEDED

    @property
    def scheduler(self) -> str:
        """The name of the scheduler that is to bind it."""
        return (self.content.spec and self.content.spec.scheduler_name) or DEFAULT_SCHEDULER

    @property
    def annotations(self) -> Mapping[str, str | None]:
        """All annotations, including irrelevant ones."""
        return (self.content.metadata and self.content.metadata.annotations) or {}

    def limits(self) -> Iterator[tuple[str, object]]:
        """Yields resource and amount of each limit of each container."""
        spec = self.content.spec or ManifestSpec()
        for container in (*(spec.init_containers or ()), *(spec.containers or ())):
            if container.resources is not None:
                yield from (container.resources.limits or {}).items()

    def to_schedule(self) -> PodToSchedule:
        """The pod as the scheduler would send it. Raises InvalidField for an invalid pod."""
        return pod_to_schedule(self.uid, self.content)


class SeenNode(NodeTraits, frozen=True, kw_only=True):
    """The fields of a node that the registry reads."""

    uid: str
    """It changes if the node is deleted and created again."""
    hami: NodeAnnotations | None = None
    """HAMi's annotations of the node; None: HAMi has registered no GPUs there."""
    allocatable_gpus: int = 0
    """Allocatable `nvidia.com/gpu`, as reported by the kubelet."""

    @property
    def key(self) -> str:
        """Identifies the node in a watch."""
        return self.name


class SeenQuota(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a ResourceQuota that the registry reads."""

    namespace: str
    name: str
    uid: str
    limits: Mapping[ResourceName, int]
    """Extended resource -> its `limits.<resource>` in `spec.hard`, which Kubernetes itself does not enforce."""
    scoped: bool = False
    """Whether it applies only to some pods of its namespace."""

    @property
    def key(self) -> str:
        """Identifies the quota in a watch."""
        return self.uid


class SeenPodGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a PodGroup that the registry reads."""

    namespace: str
    name: str
    uid: str
    minimum: int | None
    """Minimum number of pods that start together. None: its pods are scheduled one by one (policy `basic`)."""

    @property
    def key(self) -> str:
        """Identifies the PodGroup in a watch: `namespace/name`."""
        return f"{self.namespace}/{self.name}"


class GoneObject(msgspec.Struct, frozen=True):
    """An object that the API server no longer has."""

    key: str
    """UID of a pod or quota, name of a node, namespace and name of a PodGroup."""


class Synced(msgspec.Struct, frozen=True):
    """Marks that all objects that existed when the watch began, or began again, have been yielded."""


class PodEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a Kubernetes Event about a pod."""

    namespace: str
    name: str
    uid: str
    reason: str
    """In CamelCase, such as `TopologyReserved`."""
    note: str
    """The message for people. It is truncated to 1,024 bytes."""
    identity: str = ""
    """Reports with the same pod, reason and identity are one Event, even if their notes differ. Empty: the note."""
    kind: Literal["Normal", "Warning"] = "Normal"

    @property
    def key(self) -> tuple[str, str, str]:
        """UID, reason and identity. Reports with the same key are one Event, even from different replicas."""
        return self.uid, self.reason, self.identity or self.note


class KubernetesApi(Protocol):
    """
    Port to the API server, with one adapter over HTTP and one in memory.

    Except for the watches, each call returns within a few seconds, and can raise ApiUnavailable and ApiRefused in
    addition to the errors that it names.
    """

    def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        """
        Yields all pods of the cluster, then `Synced`, then each change, without end.

        After a lost connection, the watch continues where it was. If the API server no longer has the changes since
        then, it yields all pods again, a `GoneObject` for each pod that was deleted meanwhile, and another `Synced`. A
        pod's state can be yielded twice. After a failure it waits and retries (`trouble`). It raises nothing.
        """

    def nodes(self) -> AsyncGenerator[SeenNode | GoneObject | Synced, None]:
        """Follows all nodes of the cluster, as `pods` does."""

    def quotas(self) -> AsyncGenerator[SeenQuota | GoneObject | Synced, None]:
        """Follows all ResourceQuotas of the cluster, as `pods` does."""

    def pod_groups(self, api_group: str) -> AsyncGenerator[SeenPodGroup | GoneObject | Synced, None]:
        """Follows all PodGroups of this API group, as `pods` does. There are none if the cluster lacks the kind."""

    @property
    def trouble(self) -> str | None:
        """Why the followed objects may be out of date; None: no reason is known."""

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        """The pod of this name as it is now; None if there is none."""

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """
        Creates the Binding of the pod to the node.

        Raises ApiConflict if the pod is already bound, is being deleted, or has another UID, and ApiNotFound if there
        is no pod of that name. After ApiUnavailable the Binding may exist: read the pod.
        """

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the pod. Raises ApiNotFound if no pod has that name, and ApiConflict if its UID is another one."""

    async def report(self, report: PodEvent) -> None:
        """Creates an Event about a pod, unless there is one with the same key (`PodEvent.key`)."""

    async def wake(self, node: NodeName, text: str) -> None:
        """Sets the annotation `topoalign.io/woken` of a node, so that pending pods are retried. Raises ApiNotFound."""

    async def apply_topology(self, topology: Mapping[str, Any]) -> None:
        """Creates or replaces a NodeResourceTopology (v1alpha2). Raises ApiNotFound if the cluster lacks the kind."""

    async def version(self) -> tuple[int, int]:
        """The API server's version: (1, 36)."""
