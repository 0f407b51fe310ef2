"""What Prometheus is told of the allocator: one table, read when it is asked for."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from topoalign.allocator.service import Allocator


class Figure(NamedTuple):
    """One metric: its type, name and help text, and the function that reads its value from the allocator."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    value: Callable[[Allocator], int]


FIGURES = (
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_allocations",
        "Live allocations of this node.",
        lambda allocator: len(allocator.ledger.state.allocations),
    ),
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_stale_allocations",
        "Live allocations from before the last reboot whose containers have not been seen since.",
        lambda allocator: len(allocator.ledger.state.stale),
    ),
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_displaced_allocations",
        "Former allocations whose containers were not seen to end and whose devices the kubelet gave to others.",
        lambda allocator: sum(len(held.displaced) for held in allocator.ledger.state.allocations.values()),
    ),
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_record_in_doubt",
        "1 while something may be held that is not in the record: its journal was damaged.",
        lambda allocator: int(allocator.ledger.unconfirmed is not None),
    ),
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_outbox_facts",
        "Facts that the bus has not confirmed yet.",
        lambda allocator: len(allocator.ledger.pending),
    ),
    Figure(
        GaugeMetricFamily,
        "topoalign_allocator_outbox_refused",
        "1 while the bus refuses the oldest fact: its store is full, or this user is not permitted.",
        lambda allocator: int(allocator.outbox.publisher.refusal is not None),
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_outbox_taken_ids",
        "Publications whose id the store had for another message; each went out under another id.",
        lambda allocator: allocator.outbox.speaker.taken,
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_outbox_dropped_facts",
        "Facts that were never published because too many waited; a snapshot stands in for them.",
        lambda allocator: allocator.ledger.dropped,
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_forged_readings",
        "Readings of the hardware that were heard and that discovery had not said.",
        lambda allocator: allocator.hardware_watch.forged,
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_facts",
        "Facts in the journal since its epoch began.",
        lambda allocator: allocator.ledger.state.seq,
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_hint_fallbacks",
        "Hint questions answered in process because the hinting service did not.",
        lambda allocator: allocator.admissions.hint_fallbacks,
    ),
    Figure(
        CounterMetricFamily,
        "topoalign_allocator_late_requests",
        "Requests that came after their deadline and were refused.",
        lambda allocator: allocator.admissions.deadlines.missed,
    ),
)


class AllocatorMetrics(Collector):
    """Reads the allocator's metrics whenever Prometheus scrapes. `set_aside` counts the damaged journals."""

    def __init__(self, allocator: Allocator, set_aside: Callable[[], int]) -> None:
        self._allocator, self._set_aside = allocator, set_aside

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields one metric for each of `FIGURES`, and the number of journals set aside (`prometheus_client` Collector)."""
        for figure in FIGURES:
            yield figure.kind(figure.name, figure.help, value=figure.value(self._allocator))
        yield GaugeMetricFamily(
            "topoalign_allocator_journals_set_aside",
            "Damaged journals that lie in the state directory for somebody to look at.",
            value=self._set_aside(),
        )
