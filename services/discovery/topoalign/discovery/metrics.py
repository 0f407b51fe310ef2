"""Prometheus metrics of discovery."""

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import HardwareEvent

CORDONED = "cordoned"
MOST_XIDS = 1000
"""Each XID below is counted by itself: NVIDIA has numbered some two hundred."""
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """Counted by the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.reads = counter("topoalign_discovery_reads", "Readings of the hardware that were begun.")
        self.failures = counter("topoalign_discovery_read_failures", "Readings that the driver did not complete.")
        self.events = counter("topoalign_discovery_events", "What GPUs reported between readings.", ["kind"])
        self.xids = counter("topoalign_discovery_xids", "XIDs of GPUs, ignored ones too.", ["xid"])
        self.epochs = counter(
            "topoalign_discovery_epochs",
            "Epochs begun after the first, because others had spoken for this node or somebody asked for everything anew.",
        )
        self.health_changes = counter(
            "topoalign_discovery_health_changes",
            "Devices that were announced to be in another state than before.",
            ["state"],
        )
        self.seconds = Histogram(
            "topoalign_discovery_read_seconds", "Time of a reading.", registry=registry, buckets=BUCKETS
        )
        self.devices = Gauge(
            "topoalign_discovery_devices",
            "GPUs, NICs and ill MIG instances, as last announced.",
            ["state"],
            registry=registry,
        )

    def heard(self, event: HardwareEvent) -> None:
        """Count an event of the driver, ignored XIDs too."""
        self.events.labels(event.kind).inc()
        if event.xid is not None:
            self.xids.labels(event.xid if event.xid < MOST_XIDS else "other").inc()

    def announced(self, before: Mapping[DeviceID, DeviceHealth], now: Mapping[DeviceID, DeviceHealth]) -> None:
        """Count the changes between two published healths, and set the number of devices in each state."""
        for device, health in now.items():
            if device not in before or state(before[device]) != state(health):
                self.health_changes.labels(state(health)).inc()
        for name in (*HealthState, CORDONED):
            self.devices.labels(name).set(sum(state(health) == name for health in now.values()))


def state(health: DeviceHealth) -> str:
    """What an alert is about: a cordon hides what is below it only where that is well."""
    return CORDONED if health.cordoned and health.state is HealthState.HEALTHY else health.state
