"""
The naive reference: who holds what by all facts together, in the order in which they reached the disk.

As plain as can be, a dictionary; it shares no code with the product's fold.
"""

from collections.abc import Collection, Iterable, Sequence

from simulation.divisions import KNOWN, card, way
from simulation.world import Violation, World

from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    LedgerEvent,
    Owner,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import JournalEntry

Held = frozenset[tuple[ResourceName, DeviceID]]


class Record:
    """The naive reference: what all facts together say, in the order in which they became true."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.place = (0, 0)
        self.live: dict[AllocationID, tuple[Owner | None, Held]] = {}

    def hear(self, event: LedgerEvent) -> None:
        epoch, seq = self.place
        follows = (event.epoch, event.seq) in ((epoch, seq + 1), (max(epoch + 1, event.epoch), 1))
        self.expect("I5", follows, f"fact {event.epoch}/{event.seq} follows {epoch}/{seq}")
        self.place = event.epoch, event.seq
        match event:
            case AllocationGranted():
                self.grant(event.allocation)
            case AllocationBound():
                self.expect("I1", event.allocation in self.live, f"{event.allocation} was bound and is not live")
                self.live[event.allocation] = event.owner, self.live[event.allocation][1]
            case AllocationReleased():
                self.expect("I6", event.allocation in self.live, f"{event.allocation} was released and is not live")
                self.live.pop(event.allocation, None)
            case AllocationsSnapshot():
                said = {allocation.id: (allocation.owner, held_by(allocation)) for allocation in event.allocations}
                self.expect("I4", said == self.live, "a snapshot says something else than the facts before it")

    def begin_with(self, entries: Sequence[JournalEntry], published: tuple[int, int] | None) -> None:
        """After damage: what is left counts, and no number may come again that anybody has received."""
        self.live.clear()
        places = [(0, 0), published or (0, 0)]
        for event in (event for entry in entries for event in entry.events):
            places.append((event.epoch, event.seq))
            match event:
                case AllocationsSnapshot():
                    self.live = {a.id: (a.owner, held_by(a)) for a in event.allocations}
                case AllocationGranted():
                    self.live[event.allocation.id] = event.allocation.owner, held_by(event.allocation)
                case AllocationBound() if event.allocation in self.live:
                    self.live[event.allocation] = event.owner, self.live[event.allocation][1]
                case AllocationReleased():
                    self.live.pop(event.allocation, None)
        self.place = max(places)

    def grant(self, allocation: Allocation) -> None:
        held = held_by(allocation)
        for name, (_, others) in self.live.items():
            both = clashing(held, others)
            self.expect("I1", not both, f"{', '.join(both)} in {allocation.id} and in {name}")
        unknown = sorted(device for resource, device in held if device not in KNOWN.get(resource, ()))
        self.expect("I2", not unknown, f"{unknown} were given and are not known")
        self.live[allocation.id] = allocation.owner, held

    def expect(self, invariant: str, holds: bool, finding: str) -> None:
        if not holds:
            self._world.violate(Violation(invariant, finding))


def clashing(
    one: Collection[tuple[ResourceName, DeviceID]], other: Collection[tuple[ResourceName, DeviceID]]
) -> list[str]:
    """What cannot be held by both: the same device, or a card of which the other has a part."""
    return sorted(
        mine
        for _, mine in one
        for _, theirs in other
        if mine == theirs or (card(mine) == card(theirs) and (way(mine) == "whole") != (way(theirs) == "whole"))
    )


def spelled(held: Iterable[tuple[Owner | None, Held]]) -> str:
    """Who holds what, in an order that does not depend on the process."""
    lines = [
        f"{f'{owner.pod}/{owner.container}' if owner is not None else 'somebody'} {', '.join(sorted(d for _, d in places))}"
        for owner, places in held
    ]
    return "; ".join(sorted(lines)) or "none"


def held_by(allocation: Allocation) -> Held:
    return frozenset((resource, device) for resource, devices in allocation.devices.items() for device in devices)
