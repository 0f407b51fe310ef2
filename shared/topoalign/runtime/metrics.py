"""
Metrics of a service for Prometheus: plain numbers, read at each scrape.

prometheus_client is imported only when needed: HTTP may be disabled, and a node agent must list its devices first.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
from topoalign.core.model.errors import clean

Kind = Literal["gauge", "counter"]


class Collector(Protocol):
    """Protocol: yields metrics with their current values, as a Collector of `prometheus_client` does."""

    def collect(self) -> "Iterator[Metric]":
        """The metrics with their current values."""


class ServiceMetric(NamedTuple):
    """One metric, and the function that reads its value."""

    kind: Kind
    name: str
    help: str
    read: Callable[[], float | Mapping[str, float]]
    """Returns the value; for a metric with a label: label value -> value."""
    label: str | None = None

    def collect(self) -> "Iterator[Metric]":
        """Yields the metric with its current value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # see above

        family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[self.kind]
        value = self.read()
        if not isinstance(value, Mapping):
            yield family(self.name, self.help, value=value)
            return
        metric = family(self.name, self.help, labels=[self.label or ""])
        for label, each in value.items():
            metric.add_metric([label], each)
        yield metric


class Histogram:
    """Counts numbers in buckets."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        """`bounds`: the upper bounds of the buckets, ascending, without infinity."""
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts: Counter[float] = Counter()
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a number."""
        self._counts[next((bound for bound in self._bounds if value <= bound), float("inf"))] += 1
        self._sum += value

    def collect(self) -> "Iterator[Metric]":
        """Yields the metric: for each bound the count of numbers up to it, and the sum of all numbers."""
        from prometheus_client.core import HistogramMetricFamily  # see above

        total = 0
        buckets = []
        for bound in (*self._bounds, float("inf")):
            total += self._counts[bound]
            buckets.append((str(bound) if bound < float("inf") else "+Inf", float(total)))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


def registry_of(collectors: Sequence[Collector]) -> "CollectorRegistry":
    """A registry with the metrics of these collectors, including collectors that are added to the list later."""
    from prometheus_client import CollectorRegistry  # see above
    from prometheus_client.registry import Collector as PrometheusCollector

    class Group(PrometheusCollector):
        def collect(self) -> "Iterator[Metric]":
            for each in collectors:
                yield from each.collect()

    registry = CollectorRegistry()
    registry.register(Group())
    return registry


LONGEST_LABEL = 253
"""Maximum number of characters of a label value: that of a name in Kubernetes."""


def format_header(name: str, meaning: str) -> bytes:
    """The lines above the series of a gauge in Prometheus' text format."""
    return f"# HELP {name} {meaning}\n# TYPE {name} gauge\n".encode()


def format_sample(name: str, value: float, **labels: str) -> bytes:
    """One sample. Its labels are in alphabetical order; their values are printable, truncated and escaped."""
    pairs = (f'{label}="{escape_label(clean(text, LONGEST_LABEL))}"' for label, text in sorted(labels.items()))
    return f"{name}{{{','.join(pairs)}}} {float(value)}\n".encode()


def escape_label(text: str) -> str:
    """Escapes a label value; `clean` has already replaced line ends."""
    return text.replace("\\", r"\\").replace('"', r"\"")
