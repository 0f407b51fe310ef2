"""The allocator's metrics for Prometheus: one table, read at each scrape."""

from collections.abc import Callable

from topoalign.allocator.service import Allocator
from topoalign.runtime.metrics import ServiceMetric

ReadingByName = dict[str, tuple[str, Callable[[], float]]]
"""Metric -> its meaning, and its value at a scrape."""


def figures(allocator: Allocator, set_aside: Callable[[], int], syncs: Callable[[], int]) -> list[ServiceMetric]:
    """The allocator's metrics. `set_aside`: number of damaged journals. `syncs`: number of syncs of the journal."""
    ledger = allocator.ledger
    gauges: ReadingByName = {
        "topoalign_allocator_allocations": ("Live allocations of this node.", lambda: len(ledger.state.allocations)),
        "topoalign_allocator_stale_allocations": (
            "Live allocations from before the last reboot whose containers have not been seen since.",
            lambda: len(ledger.state.stale),
        ),
        "topoalign_allocator_displaced_allocations": (
            "Former allocations whose devices the kubelet gave away before their containers were seen to end.",
            lambda: sum(len(held.displaced) for held in ledger.state.allocations.values()),
        ),
        "topoalign_allocator_record_unconfirmed": (
            "1 while the record may lack allocations because its journal was damaged.",
            lambda: int(ledger.unconfirmed is not None),
        ),
        "topoalign_allocator_outbox_facts": ("Facts that the bus has not confirmed yet.", lambda: len(ledger.pending)),
        "topoalign_allocator_outbox_refused": (
            "1 while the bus refuses the oldest fact: its store is full, or this user is not permitted.",
            lambda: int(allocator.outbox.publisher.refusal is not None),
        ),
        "topoalign_allocator_journals_set_aside": (
            "Damaged journals that were set aside in the state directory.",
            set_aside,
        ),
    }
    counters: ReadingByName = {
        "topoalign_allocator_outbox_taken_ids": (
            "Facts that got another id because the store had another message under theirs.",
            lambda: allocator.outbox.facts.taken,
        ),
        "topoalign_allocator_outbox_dropped_facts": (
            "Facts that were dropped because too many waited for the bus; a snapshot replaces them.",
            lambda: ledger.dropped,
        ),
        "topoalign_allocator_forged_readings": (
            "Readings of the hardware that another client published in the name of this node.",
            lambda: allocator.hardware_watch.forged,
        ),
        "topoalign_allocator_facts": ("Facts in the journal since its epoch began.", lambda: ledger.state.seq),
        "topoalign_allocator_hint_fallbacks": (
            "Hint questions that the allocator answered because the hinting service did not.",
            lambda: allocator.admissions.hint_fallbacks,
        ),
        "topoalign_allocator_late_requests": (
            "Requests that were refused because they arrived after their deadline.",
            lambda: allocator.admissions.deadlines.missed,
        ),
        "topoalign_allocator_journal_syncs": (
            "Syncs of the journal to the disk; Allocates of one moment share one.",
            syncs,
        ),
    }
    return [
        *(ServiceMetric("gauge", name, meaning, read) for name, (meaning, read) in gauges.items()),
        *(ServiceMetric("counter", name, meaning, read) for name, (meaning, read) in counters.items()),
    ]
