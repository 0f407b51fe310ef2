"""
What allocations hold that is not offered now as it was given: after a change of what is offered, or of the hardware.

A slot with an amount is no time slice, although both have the same id: of a GPU of which a container has 100 cores by
`GPU-0::0` nobody gets the slice `GPU-0::1`. The other way round a time slice counts as a slot of an equal part.

Like `holders` it is made once of all allocations, and follows each grant and release.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import SHARE, Holding, holding_of, kind_of_share
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.holders import placed_on

Place = tuple[ResourceName, DeviceID]
T = TypeVar("T")
NOTHING: Mapping[DeviceID, object] = {}


class FormerOffers:
    """What the allocations of one node hold under former offers."""

    def __init__(
        self,
        hardware: Topology,
        cards: Mapping[DeviceID, DeviceID],
        allocations: Mapping[AllocationID, Allocation],
    ) -> None:
        """`cards`: as of `holders.cards_of`."""
        self._hardware = hardware
        self._cards = cards
        holdings: dict[AllocationID, Sequence[Holding]] = {}
        unlisted: dict[AllocationID, Sequence[Place]] = {}
        for name, held in allocations.items():
            former, gone = self._read(held)
            if former:
                holdings[name] = former
            if gone:
                unlisted[name] = gone
        self.holdings: Mapping[AllocationID, Sequence[Holding]] = holdings
        """Allocation -> what it holds that is offered under another resource, in another way, or not at all; never empty."""
        self.unlisted: Mapping[AllocationID, Sequence[Place]] = unlisted
        """Allocation -> resource and device of what it holds under ids that are not offered; never empty."""

    def granted(self, allocation: Allocation) -> "FormerOffers":
        """With this allocation, of a new id; this object if that holds nothing of the kind."""
        former, unlisted = self._read(allocation)
        if not former and not unlisted:
            return self
        return self._replaced(
            {**self.holdings, allocation.id: former} if former else self.holdings,
            {**self.unlisted, allocation.id: unlisted} if unlisted else self.unlisted,
        )

    def released(self, allocation: Allocation) -> "FormerOffers":
        """The same without this allocation; this object if that holds nothing of the kind."""
        name = allocation.id
        if name not in self.holdings and name not in self.unlisted:
            return self
        return self._replaced(without(self.holdings, name), without(self.unlisted, name))

    def _replaced(
        self, holdings: Mapping[AllocationID, Sequence[Holding]], unlisted: Mapping[AllocationID, Sequence[Place]]
    ) -> "FormerOffers":
        found = object.__new__(FormerOffers)
        found._hardware = self._hardware
        found._cards = self._cards
        found.holdings = holdings
        found.unlisted = unlisted
        return found

    def _read(self, allocation: Allocation) -> tuple[Sequence[Holding], Sequence[Place]]:
        """What an allocation adds to `holdings` and to `unlisted`."""
        former: list[Holding] = []
        unlisted: list[Place] = []
        by_base = self._hardware.offers_by_base
        devices = self._hardware.devices
        companions = allocation.companions
        for resource, given in allocation.given.items():
            for holding in given.unshared:
                offers = by_base.get(holding.base, ())
                if not any(offer.resource == resource and not offer.shared for offer in offers):
                    former.append(holding)
            for base, numbers in given.shares.items():
                now = [offer for offer in by_base.get(base, ()) if offer.resource == resource and offer.shared]
                kinds = {offer.unit for offer in now}
                in_slots = any(offer.slots is not None for offer in now)
                slots: Collection[str] = () if in_slots else allocation.slots
                for number in numbers:
                    if kind_of_share(number) not in kinds or (slots and f"{base}{SHARE}{number}" in slots):
                        former.append(holding_of(DeviceID(f"{base}{SHARE}{number}"), allocation.cards))
        if companions:  # they used no offer
            former = [each for each in former if each.id not in companions]
        if self._cards:
            former = [placed_on(self._cards, each) for each in former]
        for resource, held in (allocation.from_kubelet if companions else allocation.devices).items():
            listed = devices.get(resource, NOTHING)
            for device in held:
                if device not in listed:
                    unlisted.append((resource, device))
        return former, unlisted


def without(held: Mapping[AllocationID, Sequence[T]], gone: AllocationID) -> Mapping[AllocationID, Sequence[T]]:
    """The same without this allocation."""
    return {name: kept for name, kept in held.items() if name != gone}
