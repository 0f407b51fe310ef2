"""Prometheus metrics of discovery."""

from collections import Counter
from collections.abc import Collection, Mapping

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import HardwareEvent
from topoalign.runtime.metrics import Collector, Histogram, ServiceMetric

CORDONED = "cordoned"
MOST_XIDS = 1000
"""Each XID below this number is counted separately. NVIDIA has assigned about two hundred numbers."""
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class DiscoveryMetrics:
    """Counts readings, events and changes of health."""

    def __init__(self) -> None:
        self.reads = self.failures = self.epochs = 0
        self.seconds = Histogram(
            "topoalign_discovery_read_seconds", "Time that a reading of the hardware took.", BUCKETS
        )
        self._events: Counter[str] = Counter()
        self._xids: Counter[str] = Counter()
        self._changes: Counter[str] = Counter()
        self._devices: dict[str, int] = {}
        self._links_down: dict[str, int] = {}
        self._degraded: dict[str, int] = {}

    def figures(self) -> list[Collector]:
        """Returns all metrics, for /metrics."""
        return [
            ServiceMetric(
                "counter",
                "topoalign_discovery_reads",
                "Readings of the hardware that began.",
                lambda: self.reads,
            ),
            ServiceMetric(
                "counter",
                "topoalign_discovery_read_failures",
                "Readings that the driver did not complete.",
                lambda: self.failures,
            ),
            ServiceMetric(
                "counter",
                "topoalign_discovery_events",
                "Events that GPUs reported between readings.",
                lambda: self._events,
                "kind",
            ),
            ServiceMetric(
                "counter", "topoalign_discovery_xids", "XIDs of GPUs, ignored ones too.", lambda: self._xids, "xid"
            ),
            ServiceMetric(
                "counter",
                "topoalign_discovery_epochs",
                "New epochs after the first: another client published for this node, or all was requested again.",
                lambda: self.epochs,
            ),
            ServiceMetric(
                "counter",
                "topoalign_discovery_health_changes",
                "Changes of a device's published state.",
                lambda: self._changes,
                "state",
            ),
            self.seconds,
            ServiceMetric(
                "gauge",
                "topoalign_discovery_devices",
                "GPUs, NICs and unhealthy MIG instances, as last published.",
                lambda: self._devices,
                "state",
            ),
            ServiceMetric(
                "gauge",
                "topoalign_discovery_gpu_links_down",
                "Links to other GPUs (NVLink, xGMI) that a GPU has and that are not up, by its uuid.",
                lambda: self._links_down,
                "gpu",
            ),
            ServiceMetric(
                "gauge",
                "topoalign_discovery_gpu_degraded",
                "1 for each degraded GPU: it has fewer links than its peers, or its NVLink fabric is not in order.",
                lambda: self._degraded,
                "gpu",
            ),
        ]

    def observe(self, event: HardwareEvent) -> None:
        """Counts an event of the driver, including ignored XIDs."""
        self._events[event.kind] += 1
        if event.xid is not None:
            self._xids[str(event.xid) if event.xid < MOST_XIDS else "other"] += 1

    def count_health_changes(
        self, before: Mapping[DeviceID, DeviceHealth], now: Mapping[DeviceID, DeviceHealth]
    ) -> None:
        """Counts the changes between two published states of health, and sets the number of devices in each state."""
        for device, health in now.items():
            if device not in before or state(before[device]) != state(health):
                self._changes[state(health)] += 1
        states = Counter(state(health) for health in now.values())
        self._devices = {name: states[name] for name in (*HealthState, CORDONED)}

    def set_degraded(self, links_down: Mapping[DeviceID, int], degraded: Collection[DeviceID]) -> None:
        """Sets the number of links that are down, for each GPU, and the degraded GPUs."""
        self._links_down = {str(gpu): count for gpu, count in links_down.items()}
        self._degraded = dict.fromkeys(degraded, 1)


def state(health: DeviceHealth) -> str:
    """Returns the state that is counted: `cordoned` for a healthy device with a cordon, else the state of health."""
    return CORDONED if health.cordoned and health.state is HealthState.HEALTHY else health.state
