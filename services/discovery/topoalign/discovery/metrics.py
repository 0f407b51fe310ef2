"""What Prometheus may ask of discovery."""

from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """Counted by the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reads = Counter(
            "topoalign_discovery_reads", "Readings of the hardware that were begun.", registry=registry
        )
        self.failures = Counter(
            "topoalign_discovery_read_failures", "Readings that the driver did not complete.", registry=registry
        )
        self.seconds = Histogram(
            "topoalign_discovery_read_seconds", "Time of a reading.", registry=registry, buckets=BUCKETS
        )
