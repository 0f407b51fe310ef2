"""
What the API server shows of pods and nodes, told to the view of the cluster and to the reservations.

- A pod that is bound holds something on its node until the node shows it, also where another scheduler bound it. Only pods
  to which a kubelet hands out something of their own count: devices, or the CPUs and memory of a Guaranteed pod.
- A pod that has ended, or is gone, holds nothing. One that its node refused, or that is gone, loses its reservation at once.
  So does, when the registry begins, one that ended before: nothing tells of it any more.
- A deleted Node is forgotten; labels of nodes go to the view.
- What HAMi's annotations say of nodes and pods goes to `foreign`.

Where pods or nodes are not listed yet, the registry is not ready: it would give away what bound pods hold.
"""

from asyncio import Queue
from collections import Counter, OrderedDict
from contextlib import aclosing

import anyio
import anyio.lowlevel
import structlog

from topoalign.core.demand.node_filters import NodeTraits, is_node_eligible
from topoalign.core.model.errors import InvalidField, TopoalignError, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.foreign import ForeignNodes
from topoalign.registry.ports import (
    GoneNode,
    GonePod,
    GoneQuota,
    KubernetesApi,
    Report,
    SeenNode,
    SeenPod,
    SeenQuota,
    Synced,
)
from topoalign.registry.scheduling.binding.gangs import Gangs
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.cluster_state.shown_pods import ShownPods
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.quotas import Quotas
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.refused_pods import Cancelling, RefusedPods, was_refused
from topoalign.registry.scheduling.kubernetes.requeue import Pace, WakeUps
from topoalign.registry.scheduling.kubernetes.unmanaged_nodes import UnmanagedNodes
from topoalign.registry.scheduling.model import PodToSchedule

VERSION_SECONDS = 300.0
"""Between two questions for the API server's version, which an upgrade changes."""
PAUSE = 1.0
"""Between two while it is not known, and between two looks at what is reserved."""

log = structlog.get_logger("topoalign.registry.scheduling")


class KubernetesWatch:
    """Follows pods and nodes, and does what the modules beside this one are asked for; `run` it."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        view: ClusterView,
        reservations: Cancelling,
        gangs: Gangs | None = None,
        foreign: ForeignNodes | None = None,
        *,
        quotas: Quotas | None = None,
        delete_refused: bool,
    ) -> None:
        """`gangs`, `foreign`, `quotas`: are told what is shown as well. `delete_refused`: as `RegistrySettings`."""
        self.reports = Reports(api, clock)
        self.refused = RefusedPods(api, clock, reservations, self.reports.tell, delete=delete_refused)
        self.wake_ups = WakeUps(api, clock, waiting=lambda: bool(self.pods.waiting), nodes=lambda: self.nodes)
        self.nodes: dict[NodeName, str] = {}
        """Name -> UID of the nodes that Kubernetes has."""
        self.unmanaged: UnmanagedNodes | None = None
        """Receives the nodes as well."""
        self.bypassed: BypassedPods | None = None
        """Receives the pods that waited and are bound."""
        self.version: tuple[int, int] | None = None
        """Of the API server. None: not known yet."""
        self._api = api
        self._clock = clock
        self._view = view
        self._reservations = reservations
        self._gangs = gangs
        self._foreign = foreign or ForeignNodes(clock)
        self._quotas = quotas or Quotas(view.offers, dict)
        self.pods = ShownPods()
        self._ended: set[str] = set()
        """UIDs of finished pods that are still there."""
        self._traits: dict[NodeName, NodeTraits] = {}
        self._synced: set[str] = set()
        self._cancelled = dict[str, None]()
        self._is_cancelled = anyio.Event()
        """UIDs of pods whose reservations are to be ended."""

    def behind(self) -> str | None:
        """Readiness: why it is not known which pods are bound."""
        missing = {"pods", "nodes"} - self._synced
        if not missing:
            return None
        return self._api.trouble or f"{' and '.join(sorted(missing))} of Kubernetes are not listed yet"

    def allows(self, pod: PodToSchedule, node: NodeName) -> bool:
        """Whether Kubernetes has the node, and its scheduler's filters leave it to the pod (`node_filters`)."""
        traits = self._traits.get(node)
        return traits is not None and is_node_eligible(traits, pod.constraints)

    def has_gone(self, node: NodeName) -> bool:
        """Whether Kubernetes has no such node; not before all of them are listed."""
        return "nodes" in self._synced and node not in self.nodes

    async def run(self) -> None:
        """Follows pods and nodes, for ever."""
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
            for other in (self.refused.run, self.reports.run, self.wake_ups.run):
                tasks.start_soon(other)

    async def _follow_pods(self) -> None:
        async with aclosing(self._api.pods()) as told:
            async for each in told:
                match each:
                    case SeenPod():
                        self._see(each)
                    case GonePod():
                        self._lose(each.uid)
                    case Synced():
                        self._synced.add("pods")

    async def _follow_nodes(self) -> None:
        async with aclosing(self._api.nodes()) as told:
            async for each in told:
                match each:
                    case SeenNode():
                        self.nodes[each.name] = each.uid
                        self._traits[each.name] = NodeTraits(
                            name=each.name, labels=each.labels, taints=each.taints, unschedulable=each.unschedulable
                        )
                        self._view.label(each.name, each.labels)
                        self._foreign.see(each)
                        if self.unmanaged is not None:
                            self.unmanaged.see(each)
                    case GoneNode():
                        self.nodes.pop(each.name, None)
                        self._traits.pop(each.name, None)
                        self._view.forget(each.name)
                        self._foreign.lose(each.name)
                        if self.unmanaged is not None:
                            self.unmanaged.lose(each.name)
                        self._reservations.forget(each.name)
                    case Synced():
                        self._synced.add("nodes")

    async def _follow_quotas(self) -> None:
        async with aclosing(self._api.quotas()) as told:
            async for each in told:
                news = False
                match each:
                    case SeenQuota():
                        news = self._quotas.see(each)
                    case GoneQuota():
                        news = self._quotas.lose(each.uid)
                    case Synced():
                        self._quotas.listed = True
                if news and self._quotas.listed:  # no plugin of the scheduler looks at quotas
                    self.wake_ups.ask("QuotaChanged")

    def _see(self, pod: SeenPod) -> None:
        self._foreign.see_pod(pod)
        if self._gangs is not None:
            self._gangs.see(pod)
        if pod.finished:
            self._finish(pod)
            return
        self._quotas.see_pod(pod)
        if pod.node is None:
            if pod.uid in self.pods.waiting:
                self.pods.wait(pod)
            elif understood(pod):
                self.pods.wait(pod)
                self.wake_ups.show()
            return
        if pod.deleting:
            self._view.begin_termination(pod.node, pod.uid)
        if pod.uid not in self.pods.bound:
            if self.bypassed is not None and pod.uid in self.pods.waiting:
                self.bypassed.note_bound(self.pods.waiting[pod.uid], pod.node)
            self.pods.bind(pod.uid, pod.node)
            asked = understood(pod)
            if asked is not None:
                self._view.expect(pod.node, asked)
            if self._gangs is not None and self._gangs.node_of(pod.uid) not in (None, pod.node):
                self._cancel(pod.uid)

    def _finish(self, pod: SeenPod) -> None:
        if pod.uid in self._ended:
            return
        self._ended.add(pod.uid)
        self._end(pod.uid)
        if was_refused(pod) and "pods" in self._synced:
            self.refused.take(pod)

    def _lose(self, uid: str) -> None:
        self._foreign.lose_pod(uid)
        if self._gangs is not None:
            self._gangs.lose(uid)
        if uid in self._ended:
            self._ended.remove(uid)
        else:
            self._end(uid)

    def _end(self, uid: str) -> None:
        """The pod holds nothing any more, and nothing is kept for it."""
        self._quotas.end_pod(uid)
        node = self.pods.end(uid)
        if node is not None:
            self._view.gone(node, uid)
        if self._reservations.of_pod(uid):
            self._cancel(uid)

    def _cancel(self, uid: str) -> None:
        """Has a pod's reservations ended; once, however often that is asked for while the bus is away."""
        self._cancelled[uid] = None
        self._is_cancelled.set()

    async def _cancel_all(self) -> None:
        """
        Ends the reservations of pods that hold nothing, or hold it on another node. One that cannot be ended now ends by
        itself.
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
        Ends, every second, what is reserved for pods that are gone or bound elsewhere. They ended while no registry was
        there, or it was stored after that was received, as when a bind is given up. It would be predicted to be taken,
        and is not: pods after it would get other devices than reserved.
        """
        while self.behind() or self._reservations.behind():
            await self._clock.sleep(PAUSE)
        asked: set[str] | None = None  # at the start of all; then of those that were unknown a second ago, too
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
        """Ends what is reserved for a pod that is not shown, unless another registry has reserved for it before it is."""
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
                log.info("the version of Kubernetes was not told", finding=error.finding)
            await self._clock.sleep(VERSION_SECONDS if self.version else PAUSE)


def understood(pod: SeenPod) -> PodToSchedule | None:
    """The pod, if it will hold something of a node. What a pod that cannot be read will hold is not known."""
    try:
        asked = pod.to_schedule()
    except InvalidField:
        return None
    return asked if holds_something(asked.request) else None


# Events of Kubernetes about pods: written in a task of their own, seldom, and never waited for.
#
# The same report about the same pod is written once in ten minutes, and not while an Event of it exists: all replicas
# give it one name. At most 60 are written at once and then two a second, as events are kept in the cluster's own store;
# what exceeds that is dropped and counted. An event that fails is not repeated.


AGAIN_SECONDS = 600.0
"""An event lives for an hour; a repetition within ten minutes says nothing new."""
BURST = 60
BURST_SECONDS = 30.0
MOST_REMEMBERED = 10_000
MOST_WAITING = 100


class Reports:
    """What is to be told about pods; `run` tells it."""

    def __init__(self, api: KubernetesApi, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        """`written`, `repeated`, `dropped`, `failed`."""
        self._api = api
        self._clock = clock
        self._pace = Pace(clock, BURST, BURST_SECONDS)
        self._written: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """`Report.key` -> when it was last written, in monotonic seconds; the longest ago first."""
        self._waiting = Queue[Report](MOST_WAITING)

    def tell(self, report: Report) -> None:
        """Has the report written, unless one of the same key was lately."""
        key = report.key
        now = self._clock.monotonic()
        last = self._written.get(key)
        if last is not None and now < last + AGAIN_SECONDS:
            self.counts["repeated"] += 1
            return
        if self._waiting.full() or not self._pace.take():
            self.counts["dropped"] += 1
            return
        self._written[key] = now
        self._written.move_to_end(key)
        if len(self._written) > MOST_REMEMBERED:
            self._written.popitem(last=False)
        self._waiting.put_nowait(report)

    async def run(self) -> None:
        """Writes what is told, for ever."""
        while True:
            report = await self._waiting.get()
            await anyio.lowlevel.checkpoint()  # what it tells of is answered first
            try:
                await self._api.report(report)
            except TopoalignError as error:
                self.counts["failed"] += 1
                log.info("an event was not written", reason=report.reason, finding=error.finding)
            else:
                self.counts["written"] += 1
