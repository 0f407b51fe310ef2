"""
Which containers use more memory of a GPU than they were given, for several measurements in a row.

One measurement proves nothing: memory of a process that ends may count together with that of its successor. Only a
container that was given an amount can use more of it; a time slice has none. A measurement that does not tell what a
container uses neither counts nor ends a row. Nor does one shortly after another that counted, whoever asked for the two:
they tell of the same moment.

Example: measurements at 0, 15, 16, 30 s, all above what was given. That at 16 s does not count; that at 30 s is the third.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.usage.attribution import HolderUse, NodeShares

SAMPLES = 3
"""Measurements in a row after which a container is said to use more than it was given."""
APART_SECONDS = 7.5
"""Between two measurements that count: half of what the allocator of a node lets pass between two of its own."""


class Excess(NamedTuple):
    """A container that uses more memory of a device than it was given."""

    device: DeviceID
    holder: HolderUse


class ExcessWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Counts measurements. Frozen: `after` returns the next one."""

    time: float | None = None
    """Of the newest measurement that was counted, in wall seconds."""
    rows: Mapping[object, int] = {}
    """Device and container -> measurements in a row above what was given."""
    lasting: tuple[Excess, ...] = ()
    """Those that are above it for `SAMPLES` measurements or more."""
    begun: tuple[Excess, ...] = ()
    """Those among them for which the newest measurement was the last that it took."""

    def counts(self, time: float) -> bool:
        """Whether a measurement at this time, in wall seconds, would count. Behind a clock that was set back it does."""
        return self.time is None or abs(time - self.time) >= APART_SECONDS

    def after(self, shares: NodeShares) -> "ExcessWatch":
        """What is known after this measurement. One that does not count changes nothing, and nothing begins."""
        if not self.counts(shares.time):
            return msgspec.structs.replace(self, begun=())
        rows: dict[object, int] = {}
        lasting = []
        begun = []
        for row in shares.devices:
            for holder in row.holders:
                key = (row.device, holder.allocations)
                rows[key] = counted(self.rows.get(key, 0), holder)
                if rows[key] >= SAMPLES:
                    lasting.append(Excess(row.device, holder))
                    if self.rows.get(key, 0) < SAMPLES:
                        begun.append(lasting[-1])
        return ExcessWatch(
            time=shares.time,
            rows={key: count for key, count in rows.items() if count},
            lasting=tuple(lasting),
            begun=tuple(begun),
        )


def counted(before: int, holder: HolderUse) -> int:
    """Measurements in a row, after one more."""
    if holder.memory is None:
        return 0
    if holder.use.memory is None:
        return before
    return before + 1 if holder.use.memory > holder.memory else 0
