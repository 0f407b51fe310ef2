"""The allocator's metrics for Prometheus: one table, read at each scrape."""

from collections.abc import Callable
from functools import partial

from topoalign.allocator.service import Allocator
from topoalign.runtime.metrics import Kind, ServiceMetric

TABLE: tuple[tuple[Kind, str, str, Callable[[Allocator], int]], ...] = (
    (
        "gauge",
        "topoalign_allocator_allocations",
        "Live allocations of this node.",
        lambda allocator: len(allocator.ledger.state.allocations),
    ),
    (
        "gauge",
        "topoalign_allocator_stale_allocations",
        "Live allocations from before the last reboot whose containers have not been seen since.",
        lambda allocator: len(allocator.ledger.state.stale),
    ),
    (
        "gauge",
        "topoalign_allocator_displaced_allocations",
        "Former allocations whose devices the kubelet gave away before their containers were seen to end.",
        lambda allocator: sum(len(held.displaced) for held in allocator.ledger.state.allocations.values()),
    ),
    (
        "gauge",
        "topoalign_allocator_record_unconfirmed",
        "1 while the record may lack allocations because its journal was damaged.",
        lambda allocator: int(allocator.ledger.unconfirmed is not None),
    ),
    (
        "gauge",
        "topoalign_allocator_outbox_facts",
        "Facts that the bus has not confirmed yet.",
        lambda allocator: len(allocator.ledger.pending),
    ),
    (
        "gauge",
        "topoalign_allocator_outbox_refused",
        "1 while the bus refuses the oldest fact: its store is full, or this user is not permitted.",
        lambda allocator: int(allocator.outbox.publisher.refusal is not None),
    ),
    (
        "counter",
        "topoalign_allocator_outbox_taken_ids",
        "Facts that got another id because the store had another message under theirs.",
        lambda allocator: allocator.outbox.facts.taken,
    ),
    (
        "counter",
        "topoalign_allocator_outbox_dropped_facts",
        "Facts that were dropped because too many waited for the bus; a snapshot replaces them.",
        lambda allocator: allocator.ledger.dropped,
    ),
    (
        "counter",
        "topoalign_allocator_forged_readings",
        "Readings of the hardware that another client published in the name of this node.",
        lambda allocator: allocator.hardware_watch.forged,
    ),
    (
        "counter",
        "topoalign_allocator_facts",
        "Facts in the journal since its epoch began.",
        lambda allocator: allocator.ledger.state.seq,
    ),
    (
        "counter",
        "topoalign_allocator_hint_fallbacks",
        "Hint questions that the allocator answered because the hinting service did not.",
        lambda allocator: allocator.admissions.hint_fallbacks,
    ),
    (
        "counter",
        "topoalign_allocator_late_requests",
        "Requests that were refused because they arrived after their deadline.",
        lambda allocator: allocator.admissions.deadlines.missed,
    ),
)
"""Kind, name and help of each metric, and how it is read."""


def figures(allocator: Allocator, set_aside: Callable[[], int], syncs: Callable[[], int]) -> list[ServiceMetric]:
    """The allocator's metrics. `set_aside` counts the damaged journals, `syncs` how often the journal was synced."""
    return [
        *(ServiceMetric(kind, name, text, partial(value, allocator)) for kind, name, text, value in TABLE),
        ServiceMetric(
            "gauge",
            "topoalign_allocator_journals_set_aside",
            "Damaged journals that were set aside in the state directory.",
            set_aside,
        ),
        ServiceMetric(
            "counter",
            "topoalign_allocator_journal_syncs",
            "Syncs of the journal to the disk; Allocates of one moment share one.",
            syncs,
        ),
    ]
