"""
Passes the pods, nodes, quotas and PodGroups of the API server to the view of the cluster and to the reservations.

- A bound pod is assumed on its node until the node reports it, also if another scheduler bound it. Only pods with
  exclusive resources count: devices, or the CPUs and memory of a Guaranteed pod.
- A pod that has ended or was deleted holds nothing. If its node refused it, or if it was deleted, its reservation ends at
  once. When the registry starts, this also applies to pods that ended before, because no event follows for them.
- A deleted Node is forgotten. The labels of nodes are passed to the view.
- HAMi's annotations of nodes and pods are passed to `foreign_nodes`.

The registry is not ready until pods and nodes are listed, because it could allocate the devices of bound pods again.
"""

from contextlib import aclosing
from dataclasses import dataclass

import anyio
import structlog

from topoalign.core.demand.gangs import POD_GROUPS
from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.ports import GoneObject, KubernetesApi, SeenNode, SeenPod, SeenPodGroup, SeenQuota, Synced
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedNodes, ReportedPods, read_scheduled_pod
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.pod_events import EventWriter
from topoalign.registry.scheduling.kubernetes.refused_pods import RefusedPods, was_refused
from topoalign.registry.scheduling.kubernetes.requeue import Requeue

VERSION_SECONDS = 300.0
"""Seconds between two reads of the API server's version, which an upgrade changes."""
PAUSE = 1.0
"""Seconds between two reads while the version is unknown, and between two checks of the reservations."""

log = structlog.get_logger("topoalign.registry.scheduling")


@dataclass(frozen=True, kw_only=True)
class KubernetesRecords:
    """The records of Kubernetes objects in addition to the view."""

    pods: ReportedPods
    nodes: ReportedNodes
    foreign: ForeignNodes
    gangs: Gangs
    quotas: Quotas
    bypassed: BypassedPods


class KubernetesWatch:
    """Follows these objects, and runs the tasks of the other modules of this package."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        view: ClusterView,
        reservations: ClusterReservations,
        records: KubernetesRecords,
        requeue: Requeue,
        reports: EventWriter,
        *,
        delete_refused: bool,
    ) -> None:
        """`records` receive the objects. `delete_refused`: as in `RegistrySettings`."""
        self.requeue = requeue
        self.reports = reports
        self.refused = RefusedPods(api, clock, reservations, reports.submit, delete=delete_refused)
        self.version: tuple[int, int] | None = None
        """Version of the API server. None: still unknown."""
        self.pods = records.pods
        self.nodes = records.nodes
        self._records = records
        self._api = api
        self._clock = clock
        self._view = view
        self._reservations = reservations
        self._ended: set[str] = set()
        """UIDs of finished pods that still exist."""
        self._cancelled = dict[str, None]()
        """UIDs of pods whose reservations have to be cancelled."""
        self._is_cancelled = anyio.Event()

    def behind(self) -> str | None:
        """Readiness: why it is unknown which pods are bound; None: it is known."""
        listed = {"nodes": self.nodes.listed, "pods": self.pods.listed}
        missing = [name for name, is_listed in listed.items() if not is_listed]
        if not missing:
            return None
        return self._api.trouble or f"{' and '.join(missing)} of Kubernetes are not listed yet"

    async def run(self) -> None:
        """Follows the objects until cancelled."""
        async with anyio.create_task_group() as tasks:
            for each in (
                self._follow_pods,
                self._follow_nodes,
                self._follow_quotas,
                self._cancel_all,
                self._end_left_over,
                self._ask_version,
                self.refused.run,
            ):
                tasks.start_soon(each)
            for api_group in POD_GROUPS:
                tasks.start_soon(self._follow_pod_groups, api_group)
            tasks.start_soon(self.reports.run, self._api)
            tasks.start_soon(self.requeue.run, self._api)

    async def _follow_pods(self) -> None:
        async with aclosing(self._api.pods()) as changes:
            async for each in changes:
                match each:
                    case SeenPod():
                        self._see(each)
                    case GoneObject():
                        self._lose(each.key)
                    case Synced():
                        self.pods.listed = True

    async def _follow_nodes(self) -> None:
        async with aclosing(self._api.nodes()) as changes:
            async for each in changes:
                match each:
                    case SeenNode():
                        self._mark(self.nodes.see(each))
                        self._view.label(each.name, each.labels)
                        self._mark(self._records.foreign.see(each))
                    case GoneObject():
                        name = NodeName(each.key)
                        self.nodes.lose(name)
                        self._view.forget(name)
                        self._records.foreign.lose(name)
                        self._reservations.forget(name)
                    case Synced():
                        self.nodes.listed = True

    async def _follow_quotas(self) -> None:
        quotas = self._records.quotas
        async with aclosing(self._api.quotas()) as changes:
            async for each in changes:
                has_changed = False
                match each:
                    case SeenQuota():
                        has_changed = quotas.see(each)
                    case GoneObject():
                        has_changed = quotas.lose(each.key)
                    case Synced():
                        quotas.listed = True
                if has_changed and quotas.listed:  # no plugin of the scheduler watches quotas
                    self.requeue.ask("QuotaChanged")

    async def _follow_pod_groups(self, api_group: str) -> None:
        gangs = self._records.gangs
        async with aclosing(self._api.pod_groups(api_group)) as changes:
            async for each in changes:
                match each:
                    case SeenPodGroup():
                        if gangs.see_pod_group(api_group, each) and self.pods.listed:
                            self.requeue.ask("PodGroupChanged")
                    case GoneObject():
                        gangs.lose_pod_group(api_group, each.key)
                    case Synced():
                        gangs.listed_pod_groups.add(api_group)

    def _mark(self, node: NodeName | None) -> None:
        """Marks a changed node for renewal in the view; None: no node has changed."""
        if node is not None:
            self._view.mark(node)

    def _see(self, pod: SeenPod) -> None:
        self._mark(self._records.foreign.see_pod(pod))
        self._records.gangs.see(pod)
        if pod.finished:
            if pod.uid not in self._ended:
                self._ended.add(pod.uid)
                self._end(pod.uid)
                if was_refused(pod) and self.pods.listed:
                    self.refused.note(pod)
            return
        self._records.quotas.see_pod(pod)
        if pod.node is None:
            if pod.uid in self.pods.waiting:
                self.pods.wait(pod)
            elif read_scheduled_pod(pod):
                self.pods.wait(pod)
                self.requeue.note_waiting()
            return
        if pod.deleting:
            self._view.begin_termination(pod.node, pod.uid)
        if pod.uid not in self.pods.bound:
            if pod.uid in self.pods.waiting:
                self._records.bypassed.note_bound(self.pods.waiting[pod.uid], pod.node)
            self.pods.bind(pod.uid, pod.node)
            asked = read_scheduled_pod(pod)
            if asked is not None:
                self._view.expect(pod.node, asked)
            if self._records.gangs.node_of(pod.uid) not in (None, pod.node):
                self._cancel(pod.uid)

    def _lose(self, uid: str) -> None:
        self._mark(self._records.foreign.lose_pod(uid))
        self._records.gangs.lose(uid)
        if uid in self._ended:
            self._ended.remove(uid)
        else:
            self._end(uid)

    def _end(self, uid: str) -> None:
        """Ends all records and reservations of a pod."""
        self._records.quotas.end_pod(uid)
        node = self.pods.end(uid)
        if node is not None:
            self._view.end(node, uid)
        if self._reservations.of_pod(uid):
            self._cancel(uid)

    def _cancel(self, uid: str) -> None:
        """Queues the cancellation of a pod's reservations. While it is queued, further calls have no effect."""
        self._cancelled[uid] = None
        self._is_cancelled.set()

    async def _cancel_all(self) -> None:
        """Cancels queued reservations, except on the pod's own node. One that cannot be cancelled now expires."""
        while True:
            while not self._cancelled:
                self._is_cancelled = anyio.Event()
                await self._is_cancelled.wait()
            del self._cancelled[uid := next(iter(self._cancelled))]
            try:
                await self._reservations.cancel(uid, {*self._reservations.of_pod(uid)} - {self.pods.bound.get(uid)})
            except TopoalignError as error:
                log.warning("a reservation was not cancelled", pod_uid=clean(uid), finding=error.finding)

    async def _end_left_over(self) -> None:
        """Cancels, every second, the reservations of pods that were deleted or bound elsewhere."""
        # These pods ended while no registry ran, or the reservation was stored after their end, for example because a
        # bind was abandoned. Its devices would count as held, so later pods would get other devices than those reserved
        # for them.
        while self.behind() or self._reservations.behind():
            await self._clock.sleep(PAUSE)
        asked: set[str] | None = None  # at the start all pods; then pods that were already unknown a second ago
        while True:
            reserved = self._reservations.pods()
            unknown = {uid for uid in reserved if uid not in self.pods.bound and uid not in self.pods.waiting}
            for uid in unknown if asked is None else unknown & asked:
                await self._end_gone(uid, *reserved[uid])
            for uid, nodes in self._view.reserved_on.items():
                if uid in self.pods.bound and nodes - {self.pods.bound[uid]}:
                    self._cancel(uid)
            asked = unknown
            self._view.expire_terminated()
            await self._clock.sleep(PAUSE)

    async def _end_gone(self, uid: str, namespace: str, name: str) -> None:
        """Cancels the reservation of a pod that the watch does not report, unless the API server still has the pod."""
        try:
            seen = await self._api.pod(namespace, name)
        except TopoalignError as error:
            log.warning("it is not known whether a pod has gone", pod_uid=clean(uid), finding=error.finding)
            return
        if seen is None or seen.uid != uid or seen.finished:
            self._cancel(uid)

    async def _ask_version(self) -> None:
        while True:
            try:
                self.version = await self._api.version()
            except TopoalignError as error:
                log.info("the version of Kubernetes is not known", finding=error.finding)
            await self._clock.sleep(VERSION_SECONDS if self.version else PAUSE)
