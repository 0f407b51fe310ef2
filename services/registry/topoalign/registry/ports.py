"""
The port to Kubernetes' API server: what the registry reads there, and the few things that it writes.

`registry.kubernetes` has the adapters: one over HTTP, and one in memory for simulations and tests. Both pass one suite of
contract tests. An adapter keeps no objects: what is watched is handed on and forgotten.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from topoalign.core.demand.node_filters import Taint
from topoalign.core.model.errors import NoFit, TopoalignError, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.sharing.hami.node_annotations import NodeAnnotations
from topoalign.kubelet.files.manifest import ManifestSpec, PodManifest
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, pod_to_schedule

SUCCEEDED = "Succeeded"
FINISHED = (SUCCEEDED, "Failed")
"""Phases of a pod that no longer holds anything."""
DEFAULT_SCHEDULER = "default-scheduler"
"""The scheduler of pods that name none."""


class ApiUnavailable(Unavailable):
    """Raised when the API server does not answer, or answers that it cannot now. A write may have been done."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "check that the API server runs and can be reached from the registry")


class ApiRefused(Unavailable):
    """Raised when the API server gives no permission, or does not accept the object."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "see which permissions deploy/kubernetes gives to the registry")


class ApiConflict(NoFit):
    """Raised when an object has changed since it was read: it is bound already, or another one has its name."""

    def __init__(self, finding: str) -> None:
        super().__init__(clean(finding, 300), "read the object again and decide anew")


class ApiNotFound(TopoalignError):
    """
    Raised when Kubernetes has no such object.

    Remedy: Nothing: it was deleted, or never created.
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
    """The node that it is bound to; None: it waits."""
    phase: str
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    reason: str
    """`status.reason`: of a pod that a node refused `TopologyAffinityError`, `UnexpectedAdmissionError` and others."""
    controller: str
    """UID of the controller that owns it, which creates another one when this one is deleted; empty: none does."""
    deleting: bool
    """Whether it is being deleted; it holds its devices until it is gone."""
    waits_for: str = ""
    """Why no scheduler places it yet: `has scheduling gates`, or a claim that does not exist; empty: nothing prevents it."""
    content: PodManifest
    """What it asks for, not read yet: most changes of a pod change nothing there."""

    @property
    def key(self) -> str:
        """Identifies the pod in a watch."""
        return self.uid

    @property
    def finished(self) -> bool:
        """Whether all its containers have ended for good, or none was ever started."""
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
        """All annotations, also irrelevant ones."""
        return (self.content.metadata and self.content.metadata.annotations) or {}

    def limits(self) -> Iterator[tuple[str, object]]:
        """Yields resource and amount of each limit of a container."""
        spec = self.content.spec or ManifestSpec()
        for container in (*(spec.init_containers or ()), *(spec.containers or ())):
            if container.resources is not None:
                yield from (container.resources.limits or {}).items()

    def to_schedule(self) -> PodToSchedule:
        """The pod as the scheduler shows it. Raises InvalidField for an invalid one."""
        return pod_to_schedule(self.uid, self.content)


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a node that the registry reads."""

    name: NodeName
    uid: str
    """A node that is deleted and created again has another one."""
    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    """It is cordoned."""
    hami: NodeAnnotations | None = None
    """HAMi's annotations of it; None: HAMi has registered no GPUs there."""
    allocatable_gpus: int = 0
    """Of `nvidia.com/gpu`, as its kubelet counts them."""

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
    """Extended resource -> its `limits.<resource>` of `spec.hard`, which Kubernetes itself does not count."""
    scoped: bool = False
    """Whether it applies to some pods of its namespace only."""

    @property
    def key(self) -> str:
        """Identifies the quota in a watch."""
        return self.uid


class GoneObject(msgspec.Struct, frozen=True):
    """An object that the API server no longer has."""

    key: str
    """UID of a pod or quota, name of a node."""


class Synced(msgspec.Struct, frozen=True):
    """All that the API server had when the watch began, or began anew, has been handed on."""


class PodEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes an Event of Kubernetes about a pod."""

    namespace: str
    name: str
    uid: str
    reason: str
    """CamelCase: `TopologyReserved`."""
    note: str
    """A sentence for people; cut at 1,024 bytes."""
    identity: str = ""
    """Reports of one pod and reason with the same identity are one, whatever their notes; empty: the note."""
    kind: Literal["Normal", "Warning"] = "Normal"

    @property
    def key(self) -> tuple[str, str, str]:
        """UID, reason and identity: equal for reports that are one Event, whichever replica writes it."""
        return self.uid, self.reason, self.identity or self.note


class KubernetesApi(Protocol):
    """
    Port to the API server. HTTP is one adapter, memory the other.

    Each call but the watches returns within some seconds. All may raise ApiUnavailable and ApiRefused in addition to the
    errors they name.
    """

    def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        """
        Follows all pods of the cluster, without end: first all pods, then `Synced`, then each change.

        A lost connection is resumed where it was. If the API server no longer has the changes since then, all pods come
        again, with a `GoneObject` for each that vanished meanwhile, and another `Synced`. The same state of a pod may come
        twice. Waits and retries after failures (`trouble`), and raises nothing.
        """

    def nodes(self) -> AsyncGenerator[SeenNode | GoneObject | Synced, None]:
        """Follows all nodes of the cluster, as `pods` does."""

    def quotas(self) -> AsyncGenerator[SeenQuota | GoneObject | Synced, None]:
        """Follows all ResourceQuotas of the cluster, as `pods` does."""

    @property
    def trouble(self) -> str | None:
        """Why the followed objects may be out of date; None: they are up to date as far as is known."""

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        """The pod of this name as it is now; None if there is none."""

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """
        Creates the Binding of the pod to the node.

        Raises ApiConflict if the pod is bound already, is being deleted, or has another UID; ApiNotFound if there is none of
        that name. After ApiUnavailable the Binding may exist: read the pod.
        """

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the pod. Raises ApiNotFound if there is none of that name, and ApiConflict if it has another UID."""

    async def report(self, report: PodEvent) -> None:
        """Creates an Event about a pod, unless there is one of the same key (`PodEvent.key`)."""

    async def wake(self, node: NodeName, text: str) -> None:
        """Sets the annotation `topoalign.io/woken` of a node, so that waiting pods are tried again. Raises ApiNotFound."""

    async def apply_topology(self, topology: Mapping[str, Any]) -> None:
        """Creates or replaces a NodeResourceTopology (v1alpha2). Raises ApiNotFound if the cluster lacks the kind."""

    async def version(self) -> tuple[int, int]:
        """The API server's version: (1, 36)."""
