"""The watch of an API server, and what is kept of its objects."""

from topoalign.core.ports import Clock
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.ports import KubernetesApi
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedNodes, ReportedPods
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas
from topoalign.registry.scheduling.kubernetes.bypassed_pods import BypassedPods
from topoalign.registry.scheduling.kubernetes.cluster_watch import KubernetesRecords, KubernetesWatch
from topoalign.registry.scheduling.kubernetes.pod_events import EventWriter
from topoalign.registry.scheduling.kubernetes.requeue import Requeue
from topoalign.runtime.memory_bus import MemoryBus


def watch_of(
    api: KubernetesApi,
    clock: Clock,
    view: ClusterView,
    reservations: ClusterReservations,
    gangs: Gangs | None = None,
    *,
    delete_refused: bool = False,
) -> KubernetesWatch:
    """`gangs`: None: of reservations that nobody makes."""
    if gangs is None:
        none = ClusterReservations(MemoryBus(), clock, "r1", view.facts)
        gangs = Gangs(none, clock, lambda node: view.facts(node).hardware, lambda node: None)
    pods = ReportedPods()
    nodes = ReportedNodes(Cluster())
    reports = EventWriter(clock)
    records = KubernetesRecords(
        pods=pods,
        nodes=nodes,
        foreign=ForeignNodes(clock),
        gangs=gangs,
        quotas=Quotas(view.offers, dict),
        bypassed=BypassedPods(clock, reports.submit, lambda node: (), lambda: None, ""),
    )
    requeue = Requeue(clock, pods.waiting, nodes.uids)
    return KubernetesWatch(api, clock, view, reservations, records, requeue, reports, delete_refused=delete_refused)
