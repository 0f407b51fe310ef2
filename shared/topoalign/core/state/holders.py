"""
An index over the live allocations of one node: who holds which holding, and which parts of a device are held.

It is made once of all allocations and then follows each grant and release, at a cost that depends on what is granted or
released and not on all that is held (`persistent_map`). Of shares it keeps a table for each device that is shared, because
thousands of them may be held. It is immutable: the index of a former state stays what it was.

It reads each id by the cards of all parts that the hardware shows or showed (`cards_of`), so it follows only allocations
that do not change these; for the others a new one is made.
"""

from collections.abc import Iterator, Mapping, Sequence

from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import (
    Function,
    Holding,
    excluding,
    holding_of,
    may_have_parts,
    shared_by,
    wholes_of,
)
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.persistent_map import PersistentMap

Names = tuple[AllocationID, ...]
"""Of the live allocations that hold something, the newest last."""
Held = tuple[Sequence[Holding], Mapping[Holding, Sequence[str]]]
"""What an allocation holds, each once: what is no share; and of what is shared the numbers of its shares."""


class Holders:
    """Who holds what of one node, by holding."""

    def __init__(self, cards: Mapping[DeviceID, DeviceID], allocations: Mapping[AllocationID, Allocation]) -> None:
        """`cards`: as of `cards_of`. `allocations`: the live ones, oldest first."""
        self._cards = cards
        unshared: dict[Holding, Names] = {}
        shares: dict[Holding, dict[str, Names]] = {}
        for name, allocation in allocations.items():
            holdings, numbered = self._read(allocation)
            for holding in holdings:
                unshared[holding] = (*unshared.get(holding, ()), name)
            for base, numbers in numbered.items():
                table = shares.setdefault(base, {})
                for number in numbers:
                    table[number] = (*table.get(number, ()), name)
        self.unshared = PersistentMap(unshared)
        """What is held and is no share -> who holds it."""
        self._shares: Mapping[Holding, Mapping[str, Names]] = shares
        """What is shared -> number of a share -> who holds it. No table is empty."""
        parts: dict[Holding, dict[Holding, None]] = {}
        for held in (*unshared, *shares):
            for whole in wholes_of(held):
                parts.setdefault(whole, {})[held] = None
        self._parts = PersistentMap({whole: PersistentMap(held) for whole, held in parts.items()})
        """A whole -> its parts that are held or shared; without its shares."""

    def of(self, holding: Holding) -> Names:
        """Who holds just this."""
        if (share := shared_by(holding)) is None:
            return self.unshared.get(holding, ())
        return self._shares.get(share[0], NO_SHARES).get(share[1], ())

    def overlaps(self, holding: Holding) -> bool:
        """Whether something is held that is this, a part of it, or what it is a part of."""
        if any(map(self.of, excluding(holding))):
            return True
        return may_have_parts(holding) and (holding in self._shares or holding in self._parts)

    def inside(self, whole: Holding) -> Iterator[Names]:
        """Who holds what of it as a part, for each part that is held."""
        yield from self._shares.get(whole, NO_SHARES).values()
        for part in self._parts.get(whole, NO_PARTS):
            yield from self._shares.get(part, NO_SHARES).values()
            if part in self.unshared:
                yield self.unshared[part]

    def granted(self, allocation: Allocation) -> "Holders":
        """The index with this allocation, of a new id, as the newest one."""
        unshared = self.unshared
        shares = dict(self._shares)
        parts = self._parts
        name = allocation.id
        holdings, numbered = self._read(allocation)
        for holding in holdings:
            unshared = unshared.put(holding, (*unshared.get(holding, ()), name))
        for base, numbers in numbered.items():
            table = dict(shares.get(base, NO_SHARES))
            for number in numbers:
                table[number] = (*table.get(number, ()), name)
            shares[base] = table
        for held in (*holdings, *numbered):
            for whole in wholes_of(held):
                parts = parts.put(whole, parts.get(whole, NO_PARTS).put(held, None))
        return self._replaced(unshared, shares, parts)

    def released(self, allocation: Allocation) -> "Holders":
        """The index without this allocation, which is in it."""
        unshared = self.unshared
        shares = dict(self._shares)
        parts = self._parts
        holdings, numbered = self._read(allocation)
        for holding in holdings:
            others = without(unshared[holding], allocation.id)
            unshared = unshared.put(holding, others) if others else unshared.drop(holding)
        for base, numbers in numbered.items():
            table = dict(shares.pop(base))
            for number in numbers:
                others = without(table.pop(number), allocation.id)
                table.update({number: others} if others else {})
            shares.update({base: table} if table else {})
        for gone in dict.fromkeys((*holdings, *numbered)):
            for whole in wholes_of(gone) if gone not in unshared and gone not in shares else ():
                left = parts[whole].drop(gone)
                parts = parts.put(whole, left) if left else parts.drop(whole)
        return self._replaced(unshared, shares, parts)

    def _replaced(
        self,
        unshared: PersistentMap[Holding, Names],
        shares: Mapping[Holding, Mapping[str, Names]],
        parts: PersistentMap[Holding, PersistentMap[Holding, None]],
    ) -> "Holders":
        found = object.__new__(Holders)
        found._cards = self._cards
        found.unshared = unshared
        found._shares = shares
        found._parts = parts
        return found

    def _read(self, allocation: Allocation) -> Held:
        """All that an allocation holds, where the hardware shows it."""
        unshared = [
            placed_on(self._cards, Holding(nic, Function(address)))
            for nic, addresses in allocation.virtual_functions.items()
            for address in addresses
        ]
        shares: dict[Holding, dict[str, None]] = {}
        for given in allocation.given.values():
            unshared += (placed_on(self._cards, holding) for holding in given.unshared)
            for base, numbers in given.shares.items():
                shared = placed_on(self._cards, holding_of(base, allocation.cards))
                shares.setdefault(shared, {}).update(dict.fromkeys(numbers))
        return list(dict.fromkeys(unshared)), {base: list(numbers) for base, numbers in shares.items()}


NO_PARTS: PersistentMap[Holding, None] = PersistentMap({})
NO_SHARES: Mapping[str, Names] = {}


def without(names: Names, gone: AllocationID) -> Names:
    """The others, in their order."""
    return tuple(name for name in names if name != gone)


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
