"""
Combines sets in every possible manner that covers all devices, each exactly once: the last step of the Lagrangian
search.
"""

from collections.abc import Iterable, Sequence

from topoalign.core.placement.partition.search_budget import PartitionSearchBudget


class Cover:
    """Finds the best covers by sets of one size and at most one smaller set of what is left over, all as masks."""

    def __init__(self, masks: Iterable[int], size: int, worth: Sequence[int], work: PartitionSearchBudget) -> None:
        self.size = size
        self.worth = worth
        self.work = work
        self.full: dict[int, list[int]] = {}
        """Lowest bit -> the sets of full size of which it is the lowest."""
        self.all: dict[int, list[int]] = {}
        for mask in masks:
            self.all.setdefault(mask & -mask, []).append(mask)
            if mask.bit_count() == size:
                self.full.setdefault(mask & -mask, []).append(mask)
        self._most: dict[int, int | None] = {0: 0}

    def most(self, devices: int) -> int | None:
        """The most that a cover of exactly these devices is worth; None: there is none. Raises TooMuchWork."""
        if devices not in self._most:
            best: int | None = None
            led = self.all if devices.bit_count() % self.size else self.full
            candidates = led.get(devices & -devices, ())
            self.work.step(1 + len(candidates) // 8)
            for mask in candidates:
                if not mask & ~devices:
                    rest = self.most(devices ^ mask)
                    if rest is not None and (best is None or self.worth[mask] + rest > best):
                        best = self.worth[mask] + rest
            self._most[devices] = best
        return self._most[devices]
