"""
Prometheus metrics of the registry.

Values are computed from the fold at each scrape, so a device or allocation that is gone leaves no series behind. GPU
utilisation is exported by DCGM; `topoalign_gpu_allocation_info` joins with it on the GPU's uuid. It has one series per
allocated GPU, so the number of its label values, which include pod names, is limited by the hardware.
"""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.errors import clean
from topoalign.core.model.events import HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster import Cluster

STATES = ("free", "allocated", "unhealthy", "unknown", "cordoned")
"""Of a GPU, each in exactly one: held by an allocation first, then what keeps it from being handed out."""

READINGS = ("allocations", *wire.READINGS)
"""What is believed of a node and compared with what its services stand by."""

COUNTS = {
    "gaps": "Times that facts of a node were missing and a snapshot was asked for.",
    "undecodable": "Messages put on the dead-letter stream.",
    "unknown": "Events of a later version, skipped.",
    "repeated": "Events heard before, dropped.",
    "divergent": "Snapshots that disagreed with what their writer had said before.",
}
"""What the client counts, by the names it has there."""


class Metrics:
    """A counter that the service moves on, and gauges read from the fold."""

    def __init__(self, registry: CollectorRegistry, cluster: Cluster, client: Client) -> None:
        self.events = Counter("topoalign_registry_events", "Facts folded.", ["type"], registry=registry)
        registry.register(Readings(cluster, client))


class Readings(Collector):
    """The cluster and the client as they are now."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self._cluster, self._client = cluster, client

    def describe(self) -> Iterator[Metric]:
        """The same families without samples: registering does not look at the cluster."""
        yield from gauges()

    def collect(self) -> Iterator[Metric]:
        """The metrics of all nodes with their current values."""
        gpus, held, stale = gauges()
        for member in self._cluster:
            state = member.state
            node = clean(state.node, 253)
            tally = Tally(state_of(state, gpu.id) for gpu in state.hardware.gpus)
            for name in STATES:
                gpus.add_metric([node, name], tally[name])
            stale.add_metric([node], 0 if member.answering else 1)
            for labels in allocated_gpus(state):
                held.add_metric([node, *labels], 1)
        yield from (gpus, held, stale)
        for name, meaning in COUNTS.items():
            yield CounterMetricFamily(f"topoalign_registry_{name}", meaning, getattr(self._client.counts, name))
        differences = CounterMetricFamily(
            "topoalign_registry_differences",
            "Times that a node's services did not stand by what was believed of it, which was then asked for anew.",
            labels=["what"],
        )
        for what in READINGS:
            differences.add_metric([what], self._client.counts.differences[what])
        yield differences
        behind = GaugeMetricFamily(
            "topoalign_registry_waiting_messages",
            "Messages of a stream that waited behind the last one read.",
            labels=["stream"],
        )
        for stream, waiting in self._client.waiting.items():
            behind.add_metric([stream], waiting)
        yield behind


def gauges() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    """The three empty metrics: GPUs by state, allocated GPUs, stale nodes."""
    return (
        GaugeMetricFamily("topoalign_gpus", "GPUs by state.", labels=["node", "state"]),
        GaugeMetricFamily(
            "topoalign_gpu_allocation_info",
            "1 for each allocated GPU; gpu_uuid equals the UUID label of DCGM's exporter.",
            labels=["node", "gpu_uuid", "allocation", "namespace", "pod", "container"],
        ),
        GaugeMetricFamily(
            "topoalign_node_stale", "1 while the allocator of the node does not answer.", labels=["node"]
        ),
    )


def state_of(state: NodeState, device: DeviceID) -> str:
    """Which of STATES a GPU is in."""
    if state.ownership.is_held(device):
        return "allocated"
    health = state.health_of(device)
    if health.cordoned:
        return "cordoned"
    return "free" if health.state is HealthState.HEALTHY else health.state.value


def allocated_gpus(state: NodeState) -> Iterator[list[str]]:
    """gpu_uuid, allocation, namespace, pod, container of each GPU that an allocation has, or has a part of."""
    hardware = state.hardware
    for allocation in state.allocations.values():
        owner = allocation.owner
        of = (owner.namespace, owner.pod, owner.container) if owner is not None else ("", "", "")
        cards = {hardware.card_of(device) for device in allocation.device_ids}
        for gpu in sorted(cards & hardware.gpu_by_id.keys()):
            yield [clean(label, 253) for label in (gpu, allocation.id, *of)]
