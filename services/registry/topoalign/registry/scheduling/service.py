"""Builds and runs the parts of the registry that serve kube-scheduler."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import anyio
from anyio.abc import TaskStatus
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topoalign.client import Client
from topoalign.client.superseded import KeptNodes
from topoalign.core.admission.gang_plan import GangPlacement
from topoalign.core.diagnosis.hami_nodes import ContestedNode, ForeignNode
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.scoring.scorers import scorer_by_name
from topoalign.core.sharing.slot_defaults import FilledIn
from topoalign.core.state.node_reservations import holding_reserved
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import HAMI, ForeignNodes, serve_foreign
from topoalign.registry.ports import KubernetesApi
from topoalign.registry.scheduling.binding.binding import BindChecks, PodBinder
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedNodes, ReportedPods
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.extender.extender_server import READINESS, serve_scheduler
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas
from topoalign.registry.scheduling.filter.scheduler import PodChecks, Scheduler
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.cluster_watch import KubernetesRecords, KubernetesWatch
from topoalign.registry.scheduling.kubernetes.pod_events import EventWriter, refusal_event
from topoalign.registry.scheduling.kubernetes.requeue import Requeue
from topoalign.registry.scheduling.kubernetes.topology_objects import TopologyObjects
from topoalign.registry.scheduling.scheduling_api import Bind, PodToSchedule
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.service import PAUSE, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context


class SchedulingMetrics(Collector):
    """Prometheus metrics of binds, reservations, foreign nodes, and writes to Kubernetes."""

    def __init__(
        self,
        watch: KubernetesWatch,
        binds: Mapping[str, int],
        reservations: Mapping[str, int],
        foreign: ForeignNodes,
    ) -> None:
        """`binds`: by outcome; `reservations`: by kind of change."""
        self._watch = watch
        self._binds = binds
        self._reservations = reservations
        self._foreign = foreign

    def collect(self) -> Iterator[Metric]:
        """The metrics with their current values."""
        refused = self._watch.refused
        yield counter_family("binds", "Binds of pods, by outcome.", "outcome", self._binds)
        yield counter_family(
            "reservations", "Changes of reservations that this registry published, by kind.", "what", self._reservations
        )
        yield counter_family(
            "reports", "Events about pods for Kubernetes, by outcome.", "outcome", self._watch.reports.counts
        )
        family = CounterMetricFamily(
            "topoalign_registry_refused_pods",
            "Pods that a node refused after they were bound to it.",
            labels=["reason", "reserved"],
        )
        for (reason, reserved), number in refused.counts.items():
            family.add_metric([reason, "true" if reserved else "false"], number)
        yield family
        yield CounterMetricFamily("topoalign_registry_deleted_pods", "Refused pods that were deleted.", refused.deleted)
        nodes = GaugeMetricFamily(
            "topoalign_registry_foreign_nodes",
            "Nodes that are not offered because others manage their GPUs; contested: topoalign does as well.",
            labels=["by", "contested"],
        )
        codes = Counter(self._foreign.refusals.values())
        nodes.add_metric([HAMI, "false"], codes[ForeignNode.code])
        nodes.add_metric([HAMI, "true"], codes[ContestedNode.code])
        yield nodes
        woken = self._watch.requeue.done
        yield CounterMetricFamily("topoalign_registry_requeues", "Times that pending pods were requeued.", woken)


def counter_family(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """Builds a counter with a label value for each entry."""
    family = CounterMetricFamily(f"topoalign_registry_{name}", meaning, labels=[label])
    for each, number in counts.items():
        family.add_metric([each], number)
    return family


class NoKubernetes(Unavailable):
    """Raised for a bind if the registry has no access to Kubernetes."""

    def __init__(self) -> None:
        super().__init__(
            "the registry does not bind pods: it has no access to Kubernetes",
            "leave bindVerb out of the scheduler's configuration, or set TOPOALIGN_KUBERNETES",
        )


async def refuse_bind(namespace: str, name: str, uid: str, node: NodeName) -> None:
    """Refuses each bind in a registry without access to Kubernetes. Raises NoKubernetes."""
    raise NoKubernetes


NATS_AWAY_SECONDS = 5.0
"""
After this time without NATS, a registry becomes ready, to serve the webhook, although it has not read the nodes. The
network of a new pod may take some seconds to work.
"""


class SchedulingService:
    """Builds and runs everything that answers a scheduler, for one registry."""

    def __init__(
        self,
        context: Context,
        settings: RegistrySettings,
        client: Client,
        cluster: Cluster,
        registry: Registry,
        api: KubernetesApi | None,
        replica: str,
        foreign: ForeignNodes | None = None,
    ) -> None:
        """
        `client`, `cluster`: those of the registry, which must keep usage. `api`: None if the registry has no access to
        Kubernetes. `replica`: unique ID of this registry. `foreign`: None: a new object.
        """
        clock = context.clock
        self._context = context
        self._settings = settings
        self._registry = registry
        self._cluster = cluster
        self._is_serving = False
        """Whether all nodes were read once, or could not be read without NATS."""
        self._nodes = ReportedNodes(cluster, pass_unknown=settings.unknown_nodes == "pass")
        self._pods = ReportedPods()
        self._requeue = Requeue(clock, self._pods.waiting, self._nodes.uids)
        self._reports = EventWriter(clock)
        self.foreign = foreign or ForeignNodes(clock, cluster.is_answering)
        self.view = ClusterView(
            cluster,
            lambda: client.unsettled,
            clock,
            scorer_by_name(settings.scoring, settings.scoring_packing),
            foreign=self.foreign.refusal,
            unmanaged=self._nodes.is_unmanaged,
            offered=self._offered,
        )
        cluster.listeners.append(self.foreign.observe)
        self._bypassed = BypassedPods(
            clock, self._reports.submit, self._offered_names, self.behind, settings.scheduler_name
        )
        self.reservations = ClusterReservations(
            context.bus,
            clock,
            replica,
            self.view.facts,
            self._hold,
            lambda node: self._requeue.ask("ReservationEnded"),  # no pod used it, so no object in Kubernetes changes
            self._nodes.has_gone,
        )
        self._reserved = KeptNodes(
            partial(self.reservations.forget, although_reserved=True), lambda node: self.view.reserve(node, ())
        )
        cluster.listeners.append(self._observe)
        gangs = Gangs(self.reservations, clock, lambda node: self.view.facts(node).hardware, self._candidate)
        quotas = Quotas(self.view.offers, lambda: self.view.reserved_on, gangs.waiting_with)
        self.quotas = quotas if api is not None else None
        self.scheduler = Scheduler(
            self.view,
            self.behind,
            planned=gangs.node_of,
            plans=gangs,
            allows=self._nodes.allows,
            passes=self._passes,
            requested=self._pods.request_of,
            refused=lambda pod, counts: self._reports.submit(refusal_event(pod, counts, self._nodes.uids)),
            quotas=self.quotas,
        )
        self.watch: KubernetesWatch | None = None
        self.bind: Bind = refuse_bind
        self.topologies: TopologyObjects | None = None
        context.readiness[READINESS] = {"nodes": self.unread_nodes}
        context.checks["scheduler"] = self.behind
        if api is None:
            return
        self.watch = KubernetesWatch(
            api,
            clock,
            self.view,
            self.reservations,
            KubernetesRecords(
                pods=self._pods,
                nodes=self._nodes,
                foreign=self.foreign,
                gangs=gangs,
                quotas=quotas,
                bypassed=self._bypassed,
            ),
            self._requeue,
            self._reports,
            delete_refused=settings.delete_refused_pods,
        )
        binder = PodBinder(
            context.bus,
            clock,
            api,
            self.reservations,
            BindChecks(self.scheduler, settings.scheduler_name),
            partial(gangs.plan, self.scheduler.best),
            self._pods,
            self._reports.submit,
        )
        self.bind = binder.bind
        if settings.publish_topologies:
            self.topologies = TopologyObjects(api, clock, self.view, self._nodes.uids.get)
        context.metrics.register(SchedulingMetrics(self.watch, binder.counts, self.reservations.counts, self.foreign))
        context.notes["managed"] = self._nodes.finding
        context.notes["kubernetes"] = lambda: api.trouble
        context.readiness[READINESS]["kubernetes"] = self.watch.behind

    def behind(self) -> str | None:
        """Readiness: why data that an answer depends on is missing; None: it is complete."""
        return (
            self._registry.behind()
            or self._registry.unasked()
            or self.reservations.behind()
            or self.view.waiting()
            or (None if self.watch is None else self.watch.behind())
        )

    def unread_nodes(self) -> str | None:
        """Readiness of the Service of extender and webhook: why the nodes have not been read yet; None: it is ready."""
        # Once ready, a registry stays ready. It becomes ready without NATS, too: the webhook needs neither.
        return None if self._is_serving else self.behind()

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled. Reports as started, with the URL of the extender, once the extender listens."""
        watch = self.watch
        webhook = Webhook(
            self._settings.scheduler_name,
            self.offers,
            self.check_new,
            self.left_out,
            check_updated=self.check_valid,
            warn=self.scheduler.checks.warnings,
        )
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.follow)
            await serve_scheduler(
                self._context,
                self._settings,
                self.scheduler,
                self.bind,
                webhook,
                lambda: watch.version if watch is not None else None,
                task_status=task_status,
            )

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follows nodes, reservations and Kubernetes until cancelled; does not run the extender's server."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.view.run, self._registry.behind, PAUSE)
            tasks.start_soon(self.reservations.run)
            tasks.start_soon(self._wait_for_nodes)
            if self.watch is not None:
                tasks.start_soon(self.watch.run)
                tasks.start_soon(self.foreign.run, self.view.mark)
                tasks.start_soon(self._bypassed.run)
                await tasks.start(serve_foreign, self._context.bus, self.foreign, self.watch.behind)
            if self.topologies is not None:
                tasks.start_soon(self.topologies.run)
            task_status.started()

    async def _wait_for_nodes(self) -> None:
        """Becomes ready when all nodes have been read, or earlier, for the webhook, if NATS is disconnected."""
        clock = self._context.clock
        bus = self._context.bus
        last_connected = clock.monotonic()
        while self.behind() is not None:
            if bus.connected:
                last_connected = clock.monotonic()
            elif clock.monotonic() >= last_connected + NATS_AWAY_SECONDS:
                self._is_serving = True
            await clock.sleep(PAUSE)
        if self._is_serving:  # until now, filter has answered with an error
            self._requeue.ask("NodesRead")
        self._is_serving = True

    def offers(self, resource: ResourceName) -> bool:
        """Whether any node offers the resource; True until all nodes have been read, so that no pod bypasses us."""
        return self.view.waiting() is not None or resource in self.view.offers.names

    def left_out(self, pod: PodRequest) -> Sequence[FilledIn]:
        """The amounts that a pod with slots leaves out; empty until all nodes have been read."""
        return self._complete_offers().left_out(pod)

    def check_new(self, pod: PodRequest) -> None:
        """Raises an error for a new pod that is invalid or exceeds the quota of its namespace."""
        self.check_valid(pod)
        if self.quotas is not None:
            self.quotas.check_new(pod)

    def check_valid(self, pod: PodRequest) -> None:
        """Raises an error for an invalid pod."""
        PodChecks(self._complete_offers()).check(pod)

    def _complete_offers(self) -> OfferedResources:
        """The offers of all nodes; empty until all are read, because a part could deny a pod for too much memory."""
        return self.view.offers if self.view.waiting() is None else OfferedResources()

    def _hold(self, node: NodeName) -> None:
        """Passes the reservations of a node to the view."""
        self._reserved.note(node)
        newest = self.reservations.of(node).newest
        if newest is not None:
            self._bypassed.observe(newest)
        self.view.reserve(node, self.reservations.held(node))

    def _observe(self, node: NodeName) -> None:
        """Notes a change of a node's facts, or that it was forgotten."""
        if node in self._cluster:
            self._reserved.confirm(node)
            self.reservations.observe(node)
        elif self.reservations.of(node).reservations:
            self._reserved.unconfirm(node)
        else:
            self._reserved.forget(node)

    def _offered_names(self, node: NodeName) -> Collection[ResourceName]:
        """The resources that a node offers; empty if its allocator does not answer."""
        return self.view.offers.names_on(node) if self._cluster.is_answering(node) else ()

    def _passes(self, pod: PodToSchedule, node: NodeName) -> bool:
        """As `ReportedNodes.passes`, but False for nodes that HAMi manages. Valid only after the nodes were read."""
        return self._nodes.passes(pod, node) and not self.foreign.refusal(node)

    def _offered(self, node: NodeName) -> None:
        """Requeues pending pods after a node is offered again or has more free resources."""
        # No object in Kubernetes changes: the end of a pod is reported before its kubelet has freed its devices.
        if self.behind() is None:
            self._requeue.ask("NodeOffered")

    def _candidate(self, node: NodeName) -> GangPlacement | None:
        self.view.renew()  # its reservations may have just changed
        view = self.view.nodes.get(node)
        if view is None or view.kind is None:
            return None
        basis = self.view.basis(view)
        known = self.view.pods_on(node).reserved
        state = basis.state
        for each in self.reservations.held(node):
            if each.pod_uid not in known:  # its pod is gone, but the end of the reservation is not stored yet
                state = holding_reserved(state, each)
        return GangPlacement(state, basis.rules)
