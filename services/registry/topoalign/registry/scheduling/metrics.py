"""What the scheduler's side counts, for Prometheus."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topoalign.core.diagnosis.foreign import CONTESTED_NODE, FOREIGN_NODE
from topoalign.registry.foreign import HAMI, ForeignNodes
from topoalign.registry.scheduling.kubernetes.watch import KubernetesWatch


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
