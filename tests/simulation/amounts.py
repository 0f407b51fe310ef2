"""
I14: of no card more is held than it has, by the journal's facts and by what the kubelet's containers really use.

Both are added up as plainly as can be, from ids and from what was answered: a whole GPU is all of it, a MIG instance its
part, a unit a hundredth or a block, a slot what was recorded and told with it, and any other share an equal part. Of a card
that one container has whole nobody else has anything, and a card that is held in one way is given in no other one. The units
of a container are of one card, of whole ones, or equal parts of as many as they were reserved of.

    GPU-0: units c0 to c29 of pod a, GPU-0::m0 of pod b          30 cores and a block: all right
    GPU-1: slot 0 with 60 cores, slot 1 with 50                  110 of 100: a violation
    GPU-2: all 100 units of computing time of pod c, a block of pod d, both running: a violation
    GPU-3, GPU-4: 30 units and a block of each, of one pod       all right if they were reserved so
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from simulation.divisions import ALL_CORES, ALL_MEMORY, Much, card, much, way
from simulation.kubelet import Kubelet
from simulation.pods import Container, Pod
from simulation.world import Violation, World

from topoalign.core.model.events import (
    Allocation,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    LedgerEvent,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import JournalEntry

VARIABLE = "NVIDIA_VISIBLE_DEVICES"
Parts = Mapping[DeviceID, Much | None]
"""Device of a card -> what was recorded that is held by it; None: nothing."""


class Amounts:
    """Adds up what is held of each card."""

    def __init__(self, world: World, kubelet: Kubelet | None) -> None:
        self._world, self._kubelet = world, kubelet
        self._live: dict[AllocationID, Parts] = {}
        self.granted: dict[AllocationID, Parts] = {}
        """What each allocation that there ever was had at first."""
        self._left: set[DeviceID] = set()
        """Released by the facts just before: what of it is granted now is what is left of a record."""
        self._is_granting = False
        self.in_doubt = False
        """Whether containers were found without a record, which then count as equal parts."""
        self.unknown: set[str] = set()
        """Pods that ran when the journal was damaged: the record may know less of them than they were told."""
        world.facts.append(self.hear)
        if kubelet is not None:
            kubelet.began.append(self.begins)

    def hear(self, event: LedgerEvent) -> None:
        """A fact that has just reached the disk."""
        match event:
            case AllocationGranted():
                own = self.granted[event.allocation.id] = parts_of(event.allocation)
                if event.allocation.owner is None and not own.keys() <= self._left:
                    self._check(own)
                self._live[event.allocation.id], self._is_granting = own, True
            case AllocationReleased():
                if self._is_granting:
                    self._left.clear()
                    self._is_granting = False
                self._left |= self._live.pop(event.allocation, {}).keys()
            case AllocationsSnapshot():
                self._live = {each.id: parts_of(each) for each in event.allocations}
            case _:
                self._left.clear()

    def begin_with(self, entries: Sequence[JournalEntry]) -> None:
        """After damage: what is left counts."""
        self._live.clear()
        self.in_doubt = True
        if self._kubelet is not None:
            self.unknown |= self._kubelet.wanted.keys()
        for event in (event for entry in entries for event in entry.events):
            match event:
                case AllocationGranted():
                    self._live[event.allocation.id] = parts_of(event.allocation)
                case AllocationReleased():
                    self._live.pop(event.allocation, None)
                case AllocationsSnapshot():
                    self._live = {each.id: parts_of(each) for each in event.allocations}

    def recorded(self) -> Iterator[tuple[DeviceID, Much | None]]:
        """Every device of a card that is held by the facts so far."""
        for parts in self._live.values():
            yield from parts.items()

    def _check(self, own: Parts) -> None:
        """What a kubelet is given now, beside all that is held."""
        for each in sorted({card(device) for device in own}):
            held = [(d, m) for d, m in self.recorded() if card(d) == each]
            mine = [(d, m) for d, m in own.items() if card(d) == each]
            ways = {spelled_way(d, m) for d, m in mine} | {spelled_way(d, m) for d, m in held}
            if "slice" in ways and not any(m is None for d, m in mine if way(d) == "share"):
                ways.discard("slice")  # former time slices count as equal parts
            if len(ways) > 1 and not self.in_doubt:
                self._violate(f"{each} is given in one way, and held in another: {sorted(ways)}")
            if any(m is None for d, m in mine if way(d) == "share"):
                continue  # how much that is nobody knows
            self._expect_enough(each, [m or much(d) for d, m in (*held, *mine)], "by the journal")

    def after_step(self) -> None:
        """What the containers that run now have of each card, by what the plugin has told them."""
        if self._kubelet is None:
            return
        doubted = self._kubelet.lost | self.unknown
        of_cards = defaultdict[DeviceID, dict[tuple[str, str], list[Much]]](lambda: defaultdict(list))
        barred = set[DeviceID]()
        for (uid, container, resource), devices in self._kubelet.used.items():
            if uid not in self._kubelet.admitted or not self._kubelet.starts_in_turn.runs(uid, container):
                continue
            answer = self._kubelet.answers.get((uid, container, resource))
            told = answer.slots if answer is not None else {}
            for device in devices:
                if way(device) == "nic":
                    continue
                amount = told.get(device)
                of = Much(amount.cores, amount.memory) if amount is not None else much(device)
                of_cards[card(device)][uid, container].append(of)
                if uid in doubted:
                    barred.add(card(device))
        for each in sorted(of_cards.keys() - barred):
            holders = of_cards[each]
            self._expect_enough(
                each, [amount for held in holders.values() for amount in held], "by what containers use"
            )
            whole = {holder for holder, held in holders.items() if sum(m.cores for m in held) >= ALL_CORES}
            if whole and len(holders) > 1:
                self._violate(f"{min(whole)} has all of {each}, and so have {sorted(holders.keys() - whole)}")

    def begins(self, pod: Pod, container: Container) -> None:
        """A container begins to run: its units are a share, and it is told of the cards that it has."""
        assert self._kubelet is not None
        keys = [(pod.uid, container.name, resource) for resource in container.limits]
        used = [(key, self._kubelet.used[key]) for key in keys if key in self._kubelet.used]
        halves = {key[2]: devices for key, devices in used if any(way(device) == "unit" for device in devices)}
        title = f"{container.name} of {pod.name}"
        if halves:
            self._expect_share(title, pod.cards, halves)
        cards = {card(device) for _, devices in used for device in devices if way(device) in ("unit", "share", "whole")}
        for key, devices in used:
            answer = self._kubelet.answers.get(key)
            by_cards = self._world.driver is None and not any(way(d) == "mig" for d in devices)
            if answer is not None and VARIABLE in answer.variables and by_cards:
                told = answer.variables[VARIABLE]
                if told != ",".join(sorted(cards)):
                    self._violate(f"{title} has {sorted(cards)} and is told of {told}")

    def _expect_share(self, title: str, spread_over: int, halves: Mapping[ResourceName, frozenset[DeviceID]]) -> None:
        """
        Units are of one card, of whole ones, or equal parts of as many as they were reserved of. `spread_over`: says its
        pod; one that says 1 may have got what was reserved for another. `halves`: the units of each resource.
        """
        units = [unit for half in halves.values() for unit in half]
        cores = counted(card(unit) for unit in units if much(unit).cores)
        memory = counted(card(unit) for unit in units if much(unit).memory)
        cards = cores.keys() | memory.keys()
        if any(count >= ALL_CORES for count in cores.values()):
            right = {*cores.values()} == {ALL_CORES} and memory.keys() <= cores.keys()
        elif len(cards) > 1:
            self._world.note("spread", title, sorted(cards))
            equal = len({(cores.get(each), memory.get(each)) for each in cards}) == 1
            parts = {(resource, len(half), len(cards)) for resource, half in halves.items()}
            right = equal and parts <= self._world.reserved_parts and spread_over in (1, len(cards))
        else:
            right = True
        if not right:
            self._violate(f"{title} runs with {cores} cores and {memory} blocks, which is no share")

    def _expect_enough(self, each: DeviceID, held: Iterable[Much], by: str) -> None:
        amounts = [*held]
        cores, memory = sum(m.cores for m in amounts), sum(m.memory for m in amounts)
        if cores > ALL_CORES or memory > ALL_MEMORY:
            self._violate(
                f"{cores:g} of {ALL_CORES} cores and {memory:g} of {ALL_MEMORY} bytes of {each} are held {by}"
            )

    def _violate(self, finding: str) -> None:
        self._world.violate(Violation("I14", finding))


def parts_of(allocation: Allocation) -> Parts:
    """What an allocation holds of cards."""
    found: dict[DeviceID, Much | None] = {}
    for device in (device for devices in allocation.devices.values() for device in devices):
        if way(device) != "nic":
            amount = allocation.slots.get(device)
            found[device] = Much(amount.cores, amount.memory) if amount is not None else None
    return found


def spelled_way(device: DeviceID, recorded: Much | None) -> str:
    """How a card is held by a device."""
    if way(device) == "share":
        return "slot" if recorded is not None else "slice"
    return way(device)


def counted(cards: Iterable[DeviceID]) -> dict[DeviceID, int]:
    found: dict[DeviceID, int] = {}
    for each in cards:
        found[each] = found.get(each, 0) + 1
    return dict(sorted(found.items()))
