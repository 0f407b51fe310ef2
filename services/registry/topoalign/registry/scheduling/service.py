"""Puts the scheduler's side of the registry together and runs it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import anyio
from anyio.abc import TaskStatus
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topoalign.client import Client
from topoalign.client.superseded import KeptNodes
from topoalign.core.admission.gang_plan import GangPlacement
from topoalign.core.diagnosis.hami_nodes import CONTESTED_NODE, FOREIGN_NODE
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring.scorers import scorer_by_name
from topoalign.core.sharing.slot_defaults import FilledIn
from topoalign.registry.cluster import Cluster
from topoalign.registry.foreign import HAMI, ForeignNodes, serve_foreign
from topoalign.registry.ports import KubernetesApi
from topoalign.registry.scheduling.binding.binding import BindChecks, Binder, check_placement
from topoalign.registry.scheduling.binding.gangs import Gangs
from topoalign.registry.scheduling.binding.reservations import Reservations
from topoalign.registry.scheduling.cluster_state.assumed_pods import Hold
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.extender.server import READINESS, serve_scheduler
from topoalign.registry.scheduling.filter.quotas import Quotas
from topoalign.registry.scheduling.filter.scheduler import PodChecks, Scheduler
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.pod_events import PodEvents
from topoalign.registry.scheduling.kubernetes.topology_objects import TopologyObjects
from topoalign.registry.scheduling.kubernetes.unmanaged_nodes import UnmanagedNodes
from topoalign.registry.scheduling.kubernetes.watch import KubernetesWatch, understood
from topoalign.registry.scheduling.model import PodToSchedule
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.service import PAUSE, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context

# What the scheduler's side counts, for Prometheus.


class Figures(Collector):
    """The counts of what was bound and reserved, and of what was done in Kubernetes."""

    def __init__(
        self,
        watch: KubernetesWatch,
        binds: Mapping[str, int],
        reservations: Mapping[str, int],
        foreign: ForeignNodes,
    ) -> None:
        """`binds` by how they ended; `reservations` by what was written of them."""
        self._watch = watch
        self._binds = binds
        self._reservations = reservations
        self._foreign = foreign

    def collect(self) -> Iterator[Metric]:
        """The counters as they are now."""
        refused = self._watch.refused
        reports = self._watch.reports
        yield counted("binds", "Binds, by how they ended.", "outcome", self._binds)
        yield counted("reservations", "What this registry wrote of reservations.", "what", self._reservations)
        yield counted("reports", "Events of Kubernetes, by what became of them.", "outcome", reports.counts)
        family = CounterMetricFamily(
            "topoalign_registry_refused_pods",
            "Pods that a node refused after they were bound to it.",
            labels=["reason", "reserved"],
        )
        for (reason, reserved), number in refused.counts.items():
            family.add_metric([reason, "true" if reserved else "false"], number)
        yield family
        yield CounterMetricFamily("topoalign_registry_deleted_pods", "Refused pods that were deleted.", refused.deleted)
        yield from foreign_nodes(self._foreign)
        woken = self._watch.wake_ups.done
        yield CounterMetricFamily("topoalign_registry_wake_ups", "Times that waiting pods were woken.", woken)


def foreign_nodes(foreign: ForeignNodes) -> Iterator[Metric]:
    """Nodes that HAMi runs, and those of them for which topoalign speaks as well."""
    codes = Counter(foreign.refusals.values())
    nodes = GaugeMetricFamily(
        "topoalign_registry_foreign_nodes",
        "Nodes that are not offered because others give out their GPUs; contested: topoalign does as well.",
        labels=["by", "contested"],
    )
    nodes.add_metric([HAMI, "false"], codes[FOREIGN_NODE])
    nodes.add_metric([HAMI, "true"], codes[CONTESTED_NODE])
    yield nodes


def counted(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """A counter for each of these."""
    family = CounterMetricFamily(f"topoalign_registry_{name}", meaning, labels=[label])
    for each, number in counts.items():
        family.add_metric([each], number)
    return family


NATS_AWAY_SECONDS = 5.0
"""After so long without NATS a registry that has not read the nodes serves the webhook. The network of a new pod may take
some seconds."""


class Scheduling:
    """All that answers a scheduler, for one registry."""

    def __init__(
        self,
        context: Context,
        settings: RegistrySettings,
        client: Client,
        cluster: Cluster,
        registry: Registry,
        api: KubernetesApi | None,
        replica: str,
        freeze: Callable[[], None] = lambda: None,
        foreign: ForeignNodes | None = None,
    ) -> None:
        """
        `client` and `cluster` are those of the registry, and keep usage. `api`: None where the registry has no access to
        Kubernetes, and binds nothing. `replica`: an id that no other registry has. `freeze`: as of `Registry`. `foreign`:
        the nodes that HAMi runs; None: of its own.
        """
        self._context = context
        self._settings = settings
        self._registry = registry
        self._cluster = cluster
        self._freeze = freeze
        self._is_serving = False
        """Whether all nodes were read once since the start, or could not be read because NATS was away."""
        context.readiness[READINESS] = {"nodes": self.unread_nodes}
        clock = context.clock
        self.view = ClusterView(
            cluster, lambda: client.unsettled, clock, scorer_by_name(settings.scoring, settings.scoring_packing)
        )
        self.scheduler = Scheduler(self.view, self.behind)
        self.reservations = Reservations(
            context.bus, clock, replica, self.view.facts, self._hold, self._freed, self._has_gone
        )
        self._reserved = KeptNodes(partial(self.reservations.forget, although_reserved=True), self._let_go)
        cluster.listeners.append(self._observe)
        self.watch: KubernetesWatch | None = None
        self.binder: Binder | None = None
        self.topologies: TopologyObjects | None = None
        self.quotas: Quotas | None = None
        self.unmanaged: UnmanagedNodes | None = None
        self.bypassed: BypassedPods | None = None
        self.foreign = foreign or ForeignNodes(clock, cluster.is_answering)
        if api is not None:
            self._use(api)
        context.checks["scheduler"] = self.behind

    def _use(self, api: KubernetesApi) -> None:
        """With access to Kubernetes pods are bound, gangs are planned, and nodes that HAMi runs are known."""
        context = self._context
        clock = self._context.clock
        foreign = self.foreign
        self.view.foreign = foreign.refusal
        foreign.changed = self.view.mark
        self._cluster.listeners.append(foreign.observe)
        gangs = Gangs(self.reservations, clock, self.scheduler.best, self._hardware, self._candidate)
        delete = self._settings.delete_refused_pods
        self.quotas = self.scheduler.quotas = quotas = Quotas(self.view.offers, lambda: self.view.reserved_on)
        self.watch = KubernetesWatch(
            api, clock, self.view, self.reservations, gangs, foreign, quotas=quotas, delete_refused=delete
        )
        quotas.mates, quotas.freed = gangs.waiting_with, partial(self.watch.wake_ups.ask, "QuotaFreed")
        self.unmanaged = self.watch.unmanaged = UnmanagedNodes(
            self._cluster, pass_unknown=self._settings.unknown_nodes == "pass"
        )
        self.view.unmanaged = self.unmanaged.__contains__
        self.unmanaged.changed = self.view.mark
        foreign.behind = self.watch.behind
        shown = self.watch.pods
        self.view.offered = self._offered
        self.scheduler.planned = gangs.node_of
        self.scheduler.allows = self.watch.allows
        self.scheduler.requested = self._requested
        may_be = partial(check_placement, allows=self.watch.allows, scheduler=self._settings.scheduler_name)
        checks = BindChecks(self.scheduler, self.behind, foreign.refusal, quotas)
        self.binder = Binder(context.bus, clock, api, self.reservations, checks, gangs.plan, shown, may_be)
        self.scheduler.passes = self._passes
        context.notes["managed"] = self.unmanaged.finding
        self.bypassed = self.watch.bypassed = BypassedPods(
            clock, self.watch.reports.tell, self._offered_names, self.behind, self._settings.scheduler_name
        )
        context.notes["managedResources"] = self.bypassed.finding
        kubernetes_nodes = self.watch.nodes
        events = PodEvents(
            self.binder,
            self.reservations.of_pod,
            self.watch.reports.tell,
            quotas.claim,
            nodes=lambda: len(kubernetes_nodes),
        )
        self.scheduler.binder = events
        self.scheduler.refused = events.refuse
        if self._settings.publish_topologies:
            self.topologies = TopologyObjects(api, clock, self.view, self.watch.nodes.get)
        context.metrics.register(Figures(self.watch, self.binder.counts, self.reservations.counts, foreign))
        context.notes["kubernetes"] = lambda: api.trouble
        context.readiness[READINESS]["kubernetes"] = self.watch.behind

    def behind(self) -> str | None:
        """Readiness: why not all is known that an answer depends on."""
        checks: list[Callable[[], str | None]] = [
            self._registry.behind,
            self._registry.unasked,
            self.reservations.behind,
            self.view.waiting,
        ]
        if self.watch is not None:
            checks.append(self.watch.behind)
        return next(filter(None, (check() for check in checks)), None)

    def unread_nodes(self) -> str | None:
        """
        Readiness of the Service of extender and webhook: why the nodes are not read yet. The webhook does without them and
        without NATS, so a registry stays ready once it was, and becomes ready if NATS is away.
        """
        return None if self._is_serving else self.behind()

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; has started, with the URL of the extender, once that listens."""
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
                webhook,
                lambda: watch.version if watch is not None else None,
                task_status=task_status,
            )

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keeps up with nodes, reservations and Kubernetes until cancelled: all but the server of the extender."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.view.run, self._registry.behind, PAUSE)
            tasks.start_soon(self.reservations.run)
            tasks.start_soon(self._wait_for_nodes)
            if self.watch is not None:
                tasks.start_soon(self.watch.run)
                tasks.start_soon(self.foreign.run)
                if self.bypassed is not None:
                    tasks.start_soon(self.bypassed.run)
                await tasks.start(serve_foreign, self._context.bus, self.foreign)
            if self.topologies is not None:
                tasks.start_soon(self.topologies.run)
            task_status.started()

    async def _wait_for_nodes(self) -> None:
        """
        As soon as all is known, or NATS is away, the webhook is served. What was made of all that is known stays, and is
        frozen: the collector would look through it at the next call.
        """
        clock = self._context.clock
        bus = self._context.bus
        last_connected = clock.monotonic()
        while self.behind() is not None:
            if bus.connected:
                last_connected = clock.monotonic()
            elif clock.monotonic() >= last_connected + NATS_AWAY_SECONDS:
                self._is_serving = True
            await clock.sleep(PAUSE)
        if self._is_serving and self.watch is not None:  # filters were answered with an error meanwhile
            self.watch.wake_ups.ask("NodesRead")
        self._is_serving = True
        self._freeze()

    def offers(self, resource: ResourceName) -> bool:
        """
        Whether some node offers this resource. Before all nodes are looked at every extended resource counts as offered: no
        pod passes the scheduler by, and none is denied because the nodes are not known.
        """
        return self.view.waiting() is not None or resource in self.view.offers.names

    def left_out(self, pod: PodRequest) -> Sequence[FilledIn]:
        """What a pod that asks for slots leaves out; nothing before all nodes are looked at."""
        return () if self.view.waiting() is not None else self.view.offers.left_out(pod)

    def check_new(self, pod: PodRequest) -> None:
        """Raises what the webhook denies a new pod for: it is invalid, or its namespace may not have it."""
        self.check_valid(pod)
        if self.quotas is not None:
            self.quotas.check_new(pod)

    def check_valid(self, pod: PodRequest) -> None:
        """
        Raises what an invalid pod is denied for. Before all nodes are looked at it is judged as if nothing was offered: by a
        part of the offers a pod could be denied for more memory than these nodes have.
        """
        checks = self.scheduler.checks if self.view.waiting() is None else PodChecks(OfferedResources())
        checks.check(pod)

    def _hold(self, node: NodeName) -> None:
        """The view holds what is reserved on a node now."""
        self._reserved.hear(node)
        newest = self.reservations.of(node).newest
        if self.bypassed is not None and newest is not None:
            self.bypassed.observe(newest)
        self.view.hold(node, tuple(Hold(reserved=each) for each in self.reservations.held(node)))

    def _requested(self, reserved: Reservation) -> PodRequest | None:
        """
        What a pod asks for for which something is reserved: of one that another registry binds, or that is planned with its
        gang, Kubernetes has shown it.
        """
        own = self.binder.requests.get(reserved.pod_uid) if self.binder is not None else None
        waiting = self.watch.pods.waiting.get(reserved.pod_uid) if self.watch is not None else None
        if own is not None or waiting is None:
            return own
        asked = understood(waiting)
        return asked.request if asked is not None else None

    def _observe(self, node: NodeName) -> None:
        """A node has said something, or nothing is known of it any more."""
        if node in self._cluster:
            self._reserved.confirm(node)
            self.reservations.observe(node)
        elif self.reservations.of(node).reservations:
            self._reserved.doubt(node)
        else:
            self._reserved.forget(node)

    def _let_go(self, node: NodeName) -> None:
        self.view.hold(node, ())

    def _offered_names(self, node: NodeName) -> Collection[ResourceName]:
        """What a node offers; empty where its allocator does not answer."""
        return self.view.offers.names_on(node) if self._cluster.is_answering(node) else ()

    def _passes(self, pod: PodToSchedule, node: NodeName) -> bool:
        """As `UnmanagedNodes.passes`; of no node that HAMi runs. Right only once it is known what the nodes published."""
        return self.unmanaged is not None and self.unmanaged.passes(pod, node) and not self.foreign.refusal(node)

    def _has_gone(self, node: NodeName) -> bool:
        return self.watch is not None and self.watch.has_gone(node)

    def _freed(self, node: NodeName) -> None:
        """A reservation has ended without its pod, which nobody sees in Kubernetes."""
        if self.watch is not None:
            self.watch.wake_ups.ask("ReservationEnded")

    def _offered(self, node: NodeName) -> None:
        """
        A node is offered that was not, or has more free than before, which nobody sees in Kubernetes: a pod's end is shown
        there before its kubelet has given back what it had.
        """
        if self.watch is not None and self.behind() is None:
            self.watch.wake_ups.ask("NodeOffered")

    def _hardware(self, node: NodeName) -> Topology:
        return self.view.facts(node).hardware

    def _candidate(self, node: NodeName) -> GangPlacement | None:
        self.view.renew()  # what is reserved on it may have changed a moment ago
        view = self.view.nodes.get(node)
        if view is None or view.kind is None:
            return None
        basis = self.view.basis(view)
        return GangPlacement(basis.state, basis.rules)
