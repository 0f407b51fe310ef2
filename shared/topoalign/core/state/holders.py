"""
An index over the live allocations of one node: who holds which holding, and which parts of a device are held.

It is made once of all allocations and then follows each grant and release, at a cost that depends on what is granted or
released and not on all that is held (`persistent_map`). It is immutable: the index of a former state stays what it was.

It reads each id by the cards of all parts that the hardware shows or showed (`cards_of`), so it follows only allocations
that do not change these; for the others a new one is made.
"""

from collections.abc import Mapping, Sequence

from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import Holding, holding_of, wholes_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.persistent_map import PersistentMap


class Holders:
    """Who holds what of one node, by holding."""

    def __init__(self, cards: Mapping[DeviceID, DeviceID], allocations: Mapping[AllocationID, Allocation]) -> None:
        """`cards`: as of `cards_of`. `allocations`: the live ones, oldest first."""
        self._cards = cards
        newest: dict[Holding, tuple[AllocationID, ...]] = {}
        parts: dict[Holding, dict[Holding, None]] = {}
        for name, held in allocations.items():
            for holding in self._holdings(held):
                newest[holding] = (*newest.get(holding, ()), name)
                for whole in wholes_of(holding):
                    parts.setdefault(whole, {})[holding] = None
        self.by_holding = PersistentMap(newest)
        """What is held -> the live allocations that hold it, the newest last."""
        self.parts = PersistentMap({whole: PersistentMap(held) for whole, held in parts.items()})
        """A whole -> what is held of it as a part."""

    def granted(self, allocation: Allocation) -> "Holders":
        """The index with this allocation, of a new id, as the newest one."""
        by_holding, parts = self.by_holding, self.parts
        for holding in self._holdings(allocation):
            by_holding = by_holding.put(holding, (*by_holding.get(holding, ()), allocation.id))
            for whole in wholes_of(holding):
                parts = parts.put(whole, parts.get(whole, NO_PARTS).put(holding, None))
        return self._replaced(by_holding, parts)

    def released(self, allocation: Allocation) -> "Holders":
        """The index without this allocation, which is in it."""
        by_holding, parts = self.by_holding, self.parts
        for holding in self._holdings(allocation):
            others = tuple(name for name in by_holding[holding] if name != allocation.id)
            if others:
                by_holding = by_holding.put(holding, others)
                continue
            by_holding = by_holding.drop(holding)
            for whole in wholes_of(holding):
                left = parts[whole].drop(holding)
                parts = parts.put(whole, left) if left else parts.drop(whole)
        return self._replaced(by_holding, parts)

    def _replaced(
        self,
        by_holding: PersistentMap[Holding, tuple[AllocationID, ...]],
        parts: PersistentMap[Holding, PersistentMap[Holding, None]],
    ) -> "Holders":
        found = object.__new__(Holders)
        found._cards, found.by_holding, found.parts = self._cards, by_holding, parts
        return found

    def _holdings(self, held: Allocation) -> Sequence[Holding]:
        """All that an allocation holds, each once, where the hardware shows it."""
        whole = self._cards.keys().isdisjoint(held.bases)  # thousands of shares need not be placed one by one
        placed = held.holdings if whole else (placed_on(self._cards, holding) for holding in held.holdings)
        return list(dict.fromkeys(placed))


NO_PARTS: PersistentMap[Holding, None] = PersistentMap({})


def cards_of(hardware: Topology, allocations: Mapping[AllocationID, Allocation]) -> Mapping[DeviceID, DeviceID]:
    """Instance or virtual function -> its card, those that are gone but held included."""
    former: dict[DeviceID, DeviceID] = {}
    for held in allocations.values():
        if held.cards:
            former |= held.cards
    now = hardware.cards
    return now if former.keys() <= now.keys() else former | {**now}


def placed_on(cards: Mapping[DeviceID, DeviceID], holding: Holding) -> Holding:
    """The same on the card that the hardware shows: not every record has it."""
    card = cards.get(holding.base)
    return holding if card is None or card == holding.device else holding_of(holding.id, cards)
