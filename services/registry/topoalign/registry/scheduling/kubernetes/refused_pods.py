"""
Counts pods that a node refused after they were bound, and deletes them if configured.

The kubelet sets such a pod to Failed, with a reason, and its controller creates another one. Up to six of them are
deleted per minute. This keeps the cluster from filling with failed pods if a controller creates pods that nodes refuse.
"""

from asyncio import Queue
from collections import Counter
from collections.abc import Callable

import structlog

from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi, PodEvent, SeenPod
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.kubernetes.pod_events import TokenBucket

REFUSALS = frozenset(
    {
        "TopologyAffinityError",
        "SMTAlignmentError",
        "EmptyPodSharedPoolError",
        "UnexpectedAdmissionError",
        "OutOfcpu",
        "OutOfmemory",
        "OutOfpods",
        "NodeAffinity",
        "InvalidNodeInfo",
    }
)
"""`status.reason` of a pod that its node refused (kubelet v1.36, admission): alignment, devices, capacity, labels."""
OTHERS = "OutOf"
"""Prefix of the reason for any other missing resource: `OutOfnvidia.com/gpu`."""
DELETED = 6
DELETED_SECONDS = 60.0
MOST_WAITING = 1000

log = structlog.get_logger("topoalign.registry.scheduling")


def was_refused(pod: SeenPod) -> bool:
    """Whether the node that the pod is bound to has refused it."""
    return pod.phase == "Failed" and (pod.reason in REFUSALS or pod.reason.startswith(OTHERS))


class RefusedPods:
    """Counts refused pods. With `delete`, `run` deletes those that a controller owns."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        reservations: ClusterReservations,
        submit: Callable[[PodEvent], None],
        *,
        delete: bool,
    ) -> None:
        """`submit` queues an Event about a pod."""
        self.counts: Counter[tuple[str, bool]] = Counter()
        """(Reason, whether the pod was reserved here) -> number of pods."""
        self.deleted = 0
        self._api = api
        self._clock = clock
        self._reservations = reservations
        self._delete = delete
        self._submit = submit
        self._bucket = TokenBucket(clock, DELETED, DELETED_SECONDS)
        self._waiting = Queue[SeenPod](MOST_WAITING)

    def note(self, pod: SeenPod) -> None:
        """Counts and reports a pod that a node has refused."""
        reserved = bool(self._reservations.of_pod(pod.uid))
        reason = pod.reason if pod.reason in REFUSALS else OTHERS
        self.counts[reason, reserved] += 1
        log.warning(
            "a node refused a pod",
            node=pod.node,
            namespace=clean(pod.namespace),
            pod=clean(pod.name),
            reason=clean(pod.reason),
            reserved=reserved,
        )
        self._submit(refused_event(pod, reserved))
        if self._delete and pod.controller and not pod.deleting and not self._waiting.full():
            self._waiting.put_nowait(pod)

    async def run(self) -> None:
        """Deletes refused pods until cancelled. Does not repeat failed deletions."""
        while True:
            pod = await self._waiting.get()
            await self._clock.sleep(self._bucket.wait())
            self._bucket.take()
            try:
                await self._api.delete(pod.namespace, pod.name, pod.uid)
            except TopoalignError as error:
                log.info("a refused pod was not deleted", pod=clean(pod.name), finding=error.finding)
            else:
                self.deleted += 1


def refused_event(pod: SeenPod, reserved: bool) -> PodEvent:
    """The Event about a refused pod."""
    now = "what was reserved for it is free again" if reserved else "it was bound without a reservation"
    return PodEvent(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        reason="RefusedByNode",
        note=f"Node {pod.node} refused the pod ({clean(pod.reason)}); {now}",
        identity=pod.reason,
        kind="Warning",
    )
