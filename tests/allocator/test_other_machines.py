"""A node that plays another described machine than before keeps nothing of what was held on the former one."""

import msgspec
import pytest
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import release_other_machines
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import Allocation, AllocationReleased, TopologyDiscovered
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.ports import JournalEntry
from topoalign.machines import catalogue
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

NODE = NodeName("node-1")
DGX, HGX, HARDWARE = "described: dgx-a100", "described: hgx-h100", "nvml"


class Disk(MemoryJournal):
    full = False

    def append(self, entry: JournalEntry) -> None:
        if self.full:
            raise StateFault("cannot write the journal", "make room")
        super().append(entry)


def started(journal: MemoryJournal, source: str) -> Ledger:
    """The allocator after a restart, once discovery has said what the hardware is."""
    ledger = Ledger(NODE, journal, ManualClock())
    topology = catalogue.machine("dgx-a100")
    ledger.take_reading(
        TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source=source, topology=topology)
    )
    return ledger


def grant(ledger: Ledger) -> None:
    ledger.grant([ledger.named(Allocation(id=ledger.next_id(), devices={GPU: (DeviceID("GPU-0"),)}))])


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (DGX, DGX, 1),
        (DGX, HGX, 0),
        (DGX, HARDWARE, 0),
        (HARDWARE, HARDWARE, 1),
        (HARDWARE, DGX, 1),  # uuids of real GPUs do not repeat
    ],
)
def test_what_was_given_on_another_described_machine_is_released(before: str, after: str, kept: int) -> None:
    """What was given on another described machine is released, and nothing else."""
    journal = MemoryJournal()
    grant(started(journal, before))

    ledger = started(journal, after)
    with capture_logs() as logs:
        release_other_machines(ledger)
        release_other_machines(ledger)

    assert kept == len(ledger.state.allocations)
    assert (1 - kept) == len(logs)
    released = [event for event, _ in ledger.pending if isinstance(event, AllocationReleased)]
    assert ["other-machine"] * (1 - kept) == [event.reason for event in released]


def test_a_record_of_a_version_that_did_not_note_the_machine_is_kept() -> None:
    journal = MemoryJournal()
    ledger = started(journal, DGX)
    ledger.grant([msgspec.structs.replace(ledger.named(Allocation(id=ledger.next_id())), machine="")])

    ledger = started(journal, HGX)
    release_other_machines(ledger)

    assert 1 == len(ledger.state.allocations)


def test_nothing_is_released_without_hardware_or_with_a_full_disk() -> None:
    """Before the hardware is known, and while the disk is full, nothing is released."""
    journal = Disk()
    grant(started(journal, DGX))
    undelivered = Ledger(NODE, journal, ManualClock())
    release_other_machines(undelivered)
    held = len(undelivered.state.allocations)

    ledger = started(journal, HGX)
    journal.full = True
    release_other_machines(ledger)
    while_full = len(ledger.state.allocations)
    journal.full = False
    release_other_machines(ledger)

    assert (1, 1, 0) == (held, while_full, len(ledger.state.allocations))
