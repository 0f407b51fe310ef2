"""
Prometheus metrics of the registry itself: facts that it has read and dropped, and differences that it has found. The
metrics of the nodes are in `node_metrics`.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topoalign.client import Client
from topoalign.core import wire

READINGS = ("allocations", *wire.READINGS)
"""The facts of a node that are compared with the answers of its services."""

COUNTS = {
    "gaps": "Times that facts of a node were missing and a snapshot was requested.",
    "undecodable": "Messages put on the dead-letter stream.",
    "unknown": "Events of a later version, which were skipped.",
    "repeated": "Events that had been received before and were dropped.",
    "duplicate_agents": "Facts of a second allocator with the name of the node.",
    "divergent": "Snapshots that disagreed with earlier facts of their publisher.",
}
"""Fields of the client's `Counts`."""


class RegistryMetrics(Collector):
    """The event counter of the service, and the counts of its client."""

    def __init__(self, registry: CollectorRegistry, client: Client) -> None:
        self.events = Counter(
            "topoalign_registry_events", "Facts that were applied to the view.", ["type"], registry=registry
        )
        self._client = client
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics with their current values."""
        for name, meaning in COUNTS.items():
            yield CounterMetricFamily(f"topoalign_registry_{name}", meaning, getattr(self._client.counts, name))
        forgotten = "Nodes that never answered and were forgotten because there were too many of them."
        yield CounterMetricFamily("topoalign_registry_unknown_nodes_forgotten", forgotten, self._client.kept.dropped)
        differences = CounterMetricFamily(
            "topoalign_registry_differences",
            "Times that a service of a node did not confirm the view of it, which was then requested again.",
            labels=["what"],
        )
        for what in READINGS:
            differences.add_metric([what], self._client.counts.differences[what])
        yield differences
        behind = GaugeMetricFamily(
            "topoalign_registry_waiting_messages",
            "Messages of a stream that have not been read yet.",
            labels=["stream"],
        )
        for stream, waiting in self._client.waiting.items():
            behind.add_metric([stream], waiting)
        yield behind
