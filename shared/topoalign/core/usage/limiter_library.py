"""
Reports what the library that limits a container counts, in addition to what the driver measures.

The two differ, and neither corrects the other: the driver reports what the processes of a container have, contexts among it;
the library counts what it has seen, and the container could write anything into its file. So a count stands with the
container that it is of, for GPUs that this holds, and nothing else uses it.
"""

import msgspec

from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.processes import LibraryCount, LibraryReading
from topoalign.core.state.fold import NodeState
from topoalign.core.usage.attribution import HolderUse, NodeShares


def has_library(state: NodeState) -> bool:
    """Whether containers of the node may be limited by a library that shares files: so the library is asked."""
    return any(offer.limiter == "hami-core" for offer in state.hardware.offered)


def with_library(shares: NodeShares, reading: LibraryReading) -> NodeShares:
    """The same, each holder with what its library counts of the device; a device that it does not hold is passed over."""
    counts: dict[tuple[AllocationID, DeviceID], LibraryCount] = {
        (use.allocation, count.device): count for use in reading.containers for count in use.counts
    }

    def counted(holder: HolderUse, device: DeviceID) -> HolderUse:
        found = [counts[each, device] for each in holder.allocations if (each, device) in counts]
        return msgspec.structs.replace(holder, library=found[-1]) if found else holder

    rows = (
        msgspec.structs.replace(row, holders=tuple(counted(each, row.device) for each in row.holders))
        for row in shares.devices
    )
    return msgspec.structs.replace(shares, devices=tuple(rows), library_finding=reading.finding)
