"""
Passes what the API server reports of pods and nodes to the view of the cluster and to the reservations.

- A bound pod is assumed on its node until the node reports it, also if another scheduler bound it. Only pods with
resources of
  their own count: devices, or the exclusive CPUs and memory of a Guaranteed pod.
- A pod that has ended or was deleted holds nothing. If its node refused it, or if it was deleted, its reservation ends
at once.
  When the registry starts, this also applies to pods that ended before, because no event follows for them.
- A deleted Node is forgotten; labels of nodes go to the view.
- HAMi's annotations of nodes and pods go to `foreign_nodes`.

As long as pods or nodes are not listed, the registry is not ready, because it would allocate devices of bound pods again.
"""

from asyncio import Queue
from collections import Counter, OrderedDict
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import structlog

from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.ports import (
    Gone,
    KubernetesApi,
    PodEvent,
    SeenNode,
    SeenPod,
    SeenQuota,
    Synced,
)
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedNodes, ReportedPods, read_scheduled_pod
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.pod_quotas import Quotas
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.refused_pods import Cancelling, RefusedPods, was_refused
from topoalign.registry.scheduling.kubernetes.requeue import Requeue, RequeueBucket
from topoalign.registry.scheduling.kubernetes.unmanaged_nodes import UnmanagedNodes

VERSION_SECONDS = 300.0
"""Between two reads of the API server's version, which an upgrade changes."""
PAUSE = 1.0
"""Between two reads while it is not known, and between two checks of the reservations."""

log = structlog.get_logger("topoalign.registry.scheduling")


@dataclass(frozen=True, kw_only=True)
class KubernetesRecords:
    """What is kept of the objects of Kubernetes in addition to the view."""

    pods: ReportedPods
    nodes: ReportedNodes
    foreign: ForeignNodes
    unmanaged: UnmanagedNodes
    gangs: Gangs
    quotas: Quotas
    bypassed: BypassedPods


class KubernetesWatch:
    """Follows pods and nodes, and runs the tasks of the other modules of this package."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        view: ClusterView,
        reservations: Cancelling,
        records: KubernetesRecords,
        requeue: Requeue,
        reports: "EventWriter",
        *,
        delete_refused: bool,
    ) -> None:
        """`records` receive what is followed. `delete_refused`: as in `RegistrySettings`."""
        self.requeue = requeue
        self.reports = reports
        self.refused = RefusedPods(api, clock, reservations, reports.submit, delete=delete_refused)
        self.version: tuple[int, int] | None = None
        """Of the API server. None: not known yet."""
        self._api = api
        self._clock = clock
        self._view = view
        self._reservations = reservations
        self.pods = records.pods
        self.nodes = records.nodes
        self._foreign = records.foreign
        self._unmanaged = records.unmanaged
        self._gangs = records.gangs
        self._quotas = records.quotas
        self._bypassed = records.bypassed
        self._ended: set[str] = set()
        """UIDs of finished pods that still exist."""
        self._cancelled = dict[str, None]()
        self._is_cancelled = anyio.Event()
        """UIDs of pods whose reservations have to be cancelled."""

    def behind(self) -> str | None:
        """Readiness: why it is not known which pods are bound."""
        listed = {"nodes": self.nodes.listed, "pods": self.pods.listed}
        missing = [name for name, is_listed in listed.items() if not is_listed]
        if not missing:
            return None
        return self._api.trouble or f"{' and '.join(missing)} of Kubernetes are not listed yet"

    async def run(self) -> None:
        """Follows pods and nodes until cancelled."""
        async with anyio.create_task_group() as tasks:
            for each in (
                self._follow_pods,
                self._follow_nodes,
                self._follow_quotas,
                self._cancel_all,
                self._end_left_over,
                self._ask_version,
            ):
                tasks.start_soon(each)
            tasks.start_soon(self.refused.run)
            tasks.start_soon(self.reports.run, self._api)
            tasks.start_soon(self.requeue.run, self._api)

    async def _follow_pods(self) -> None:
        async with aclosing(self._api.pods()) as changes:
            async for each in changes:
                match each:
                    case SeenPod():
                        self._see(each)
                    case Gone():
                        self._lose(each.key)
                    case Synced():
                        self.pods.listed = True

    async def _follow_nodes(self) -> None:
        async with aclosing(self._api.nodes()) as changes:
            async for each in changes:
                match each:
                    case SeenNode():
                        self.nodes.see(each)
                        self._view.label(each.name, each.labels)
                        self._mark(self._foreign.see(each))
                        self._mark(self._unmanaged.see(each))
                    case Gone():
                        name = NodeName(each.key)
                        self.nodes.lose(name)
                        self._view.forget(name)
                        self._foreign.lose(name)
                        self._unmanaged.lose(name)
                        self._reservations.forget(name)
                    case Synced():
                        self.nodes.listed = True

    async def _follow_quotas(self) -> None:
        async with aclosing(self._api.quotas()) as changes:
            async for each in changes:
                news = False
                match each:
                    case SeenQuota():
                        news = self._quotas.see(each)
                    case Gone():
                        news = self._quotas.lose(each.key)
                    case Synced():
                        self._quotas.listed = True
                if news and self._quotas.listed:  # no plugin of the scheduler watches quotas
                    self.requeue.ask("QuotaChanged")

    def _mark(self, node: NodeName | None) -> None:
        """Has the view renew a node that has changed."""
        if node is not None:
            self._view.mark(node)

    def _see(self, pod: SeenPod) -> None:
        self._mark(self._foreign.see_pod(pod))
        self._gangs.see(pod)
        if pod.finished:
            self._finish(pod)
            return
        self._quotas.see_pod(pod)
        if pod.node is None:
            if pod.uid in self.pods.waiting:
                self.pods.wait(pod)
            elif read_scheduled_pod(pod):
                self.pods.wait(pod)
                self.requeue.show()
            return
        if pod.deleting:
            self._view.begin_termination(pod.node, pod.uid)
        if pod.uid not in self.pods.bound:
            if pod.uid in self.pods.waiting:
                self._bypassed.note_bound(self.pods.waiting[pod.uid], pod.node)
            self.pods.bind(pod.uid, pod.node)
            asked = read_scheduled_pod(pod)
            if asked is not None:
                self._view.expect(pod.node, asked)
            if self._gangs.node_of(pod.uid) not in (None, pod.node):
                self._cancel(pod.uid)

    def _finish(self, pod: SeenPod) -> None:
        if pod.uid in self._ended:
            return
        self._ended.add(pod.uid)
        self._end(pod.uid)
        if was_refused(pod) and self.pods.listed:
            self.refused.take(pod)

    def _lose(self, uid: str) -> None:
        self._mark(self._foreign.lose_pod(uid))
        self._gangs.lose(uid)
        if uid in self._ended:
            self._ended.remove(uid)
        else:
            self._end(uid)

    def _end(self, uid: str) -> None:
        """Ends everything that is kept for a pod."""
        self._quotas.end_pod(uid)
        node = self.pods.end(uid)
        if node is not None:
            self._view.gone(node, uid)
        if self._reservations.of_pod(uid):
            self._cancel(uid)

    def _cancel(self, uid: str) -> None:
        """Schedules the end of a pod's reservations, once for repeated calls while the bus is disconnected."""
        self._cancelled[uid] = None
        self._is_cancelled.set()

    async def _cancel_all(self) -> None:
        """
        Cancels the reservations of pods that hold nothing, or are on another node. A reservation that cannot be
        cancelled now expires.
        """
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
        """
        Cancels, every second, the reservations of pods that were deleted or bound elsewhere. They ended while no
        registry ran, or the reservation was stored after their end, for example when a bind was given up. Such a
        reservation would count as held, so later pods would get other devices than reserved.
        """
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
        """Cancels the reservation of an unreported pod, unless the API server still has it."""
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


# Kubernetes Events about pods are written in a task of their own, and nothing waits for them.
#
# The same Event about the same pod is written once in ten minutes, and not while it exists: all replicas use the same
# name. At most 60 are written at once and then two a second, because events are stored in the cluster's own store; more
# are dropped and counted. A failed event is not repeated.


AGAIN_SECONDS = 600.0
"""An event exists for an hour; a repetition within ten minutes adds nothing."""
BURST = 60
BURST_SECONDS = 30.0
MOST_REMEMBERED = 10_000
MOST_WAITING = 100


class EventWriter:
    """Writes Events about pods; `run` it."""

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        """`written`, `repeated`, `dropped`, `failed`."""
        self._clock = clock
        self._bucket = RequeueBucket(clock, BURST, BURST_SECONDS)
        self._written: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """`PodEvent.key` -> monotonic seconds of its last write, the oldest first."""
        self._waiting = Queue[PodEvent](MOST_WAITING)

    def submit(self, report: PodEvent) -> None:
        """Queues an Event, unless one of the same key was written recently."""
        key = report.key
        now = self._clock.monotonic()
        last = self._written.get(key)
        if last is not None and now < last + AGAIN_SECONDS:
            self.counts["repeated"] += 1
            return
        if self._waiting.full() or not self._bucket.take():
            self.counts["dropped"] += 1
            return
        self._written[key] = now
        self._written.move_to_end(key)
        if len(self._written) > MOST_REMEMBERED:
            self._written.popitem(last=False)
        self._waiting.put_nowait(report)

    async def run(self, api: KubernetesApi) -> None:
        """Writes queued Events to this API server until cancelled."""
        while True:
            report = await self._waiting.get()
            await anyio.lowlevel.checkpoint()  # the call that it is about is answered first
            try:
                await api.report(report)
            except TopoalignError as error:
                self.counts["failed"] += 1
                log.info("an event was not written", reason=report.reason, finding=error.finding)
            else:
                self.counts["written"] += 1
