"""
Allocations of another described machine: what stays in a state directory whose node now plays a different one.

Ids of described machines repeat: every catalogue machine has a GPU-0. So what was held on the former machine would be taken
for held on the new one, and nobody would ever release it. Uuids of real GPUs do not repeat: records of real hardware stay.
"""

import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import AllocationID

log = structlog.get_logger("topoalign.allocator")


def of_other_machines(ledger: Ledger) -> dict[AllocationID, str]:
    """Live allocations of a described machine that the node does not play any more -> that machine."""
    if ledger.state.topology is None:
        return {}
    return {
        name: allocation.machine
        for name, allocation in ledger.state.allocations.items()
        if allocation.machine not in ("", ledger.machine)
    }


def release_other_machines(ledger: Ledger) -> None:
    """
    Releases the allocations of a described machine that the node does not play any more, and logs that.

    An allocation recorded by a version that did not record the machine stays.
    """
    others = of_other_machines(ledger)
    if not others or ledger.state.topology is None:
        return
    try:
        ledger.release(tuple(others), "other-machine")
    except StateFault:  # the ledger has said so; the next call tries again
        return
    log.warning(
        "the record is of another machine: its allocations are released",
        machine=ledger.state.topology.source,
        recorded=sorted(set(others.values())),
        allocations=len(others),
    )
