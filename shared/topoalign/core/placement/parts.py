"""
Which shares, MIG instances or virtual functions a container gets.

They are chosen one by one, from the card of which the fewest are held (`distributed`) or the most (`packed`), counting those
chosen already; of equals from the card that this container has the fewest of, then from the nearest to the cards that it
has, then in the hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which leaves the rest to
chance.

A node may offer thousands of shares, and one of them is wanted. The available ones are therefore marked in a byte for each
place of the resource (`MarkedDevices`), in which the parts of a card follow one another: how many a card has, and which is
the first of them, is counted and searched in bytes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import compress, islice
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score, places_of
from topoalign.core.model.topology.views import made_once

MARK = b"\1"


class MarkedDevices(Collection[DeviceID]):
    """A set of devices of one resource, iterated in the hardware's order."""

    def __init__(self, places: Mapping[DeviceID, int], devices: Iterable[DeviceID]) -> None:
        """`places`: of all that is listed of the resource (`places_of`), in their order. Others are left out of the set."""
        self.places = places
        self.marks = bytearray(map(frozenset(devices).__contains__, places))
        """1 at the place of each device of the set, else 0."""

    def __contains__(self, device: object) -> bool:
        place = self.places.get(device)  # type: ignore[call-overload]  # what is no id has no place
        return place is not None and self.marks[place] == 1

    def __iter__(self) -> Iterator[DeviceID]:
        return compress(self.places, self.marks)

    def __len__(self) -> int:
        return self.marks.count(MARK)

    def without(self, devices: Iterable[DeviceID]) -> "MarkedDevices":
        """The others of the set."""
        others = copy(self)
        others.marks = self.marks.copy()
        for device in devices:
            if device in others:
                others.marks[self.places[device]] = 0
        return others


def marked(topology: Topology, resource: ResourceName, devices: Collection[DeviceID]) -> MarkedDevices | None:
    """The set of these devices; None where one of them is not listed, or is named more than once."""
    found = MarkedDevices(places_of(topology).get(resource, {}), devices)
    return found if len(found) == len(devices) else None


class Run(NamedTuple):
    """Places of parts of one card that follow one another."""

    start: int
    end: int
    """After the last one."""


class Parts(NamedTuple):
    """What is listed of one resource."""

    ids: tuple[DeviceID, ...]
    """In the hardware's order: an id's index is its place."""
    runs: Mapping[DeviceID, Sequence[Run]]
    """Card -> its parts, in the hardware's order."""


def prefer_parts(
    topology: Topology,
    resource: ResourceName,
    available: MarkedDevices,
    must_include: Sequence[DeviceID],
    size: int,
    near: Sequence[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """
    The `size` of them that are best, in the hardware's order; `near` are other devices of the container.

    () where there is no preference to give: size below 1 or above what is available, or too small for `must_include`, or one
    of these is not available.
    """
    if not max(1, len(must_include)) <= size <= len(available) or not all(map(available.__contains__, must_include)):
        return ()
    ids, runs = parts_of(topology)[resource]
    chosen = {available.places[device] for device in must_include}
    free = available.without(must_include).marks
    left = {card: sum(free.count(MARK, *run) for run in mine) for card, mine in runs.items()}
    held = {card: sum(run.end - run.start for run in mine) - left[card] for card, mine in runs.items()}
    sign = -1 if any(offer.packing == "packed" for offer in topology.offers_of[resource]) else 1
    taken: Counter[DeviceID] = Counter(topology.card_of(ids[at]) for at in chosen)
    others = [topology.card_of(device) for device in near]
    links = {card: sum(linked(topology, card, other) for other in (*others, *taken)) for card in runs}
    order = {card: index for index, card in enumerate(runs)}
    while len(chosen) < size:
        card = min(
            (card for card, count in left.items() if count),
            key=lambda card: (sign * held[card], taken[card], -links[card], order[card]),
        )
        at = next(at for run in runs[card] if (at := free.find(MARK, *run)) >= 0)
        chosen.add(at)
        free[at] = 0
        if not taken[card]:
            links = {other: links[other] + linked(topology, other, card) for other in links}
        left[card] -= 1
        held[card] += 1
        taken[card] += 1
    return tuple(ids[at] for at in sorted(chosen))


@made_once
def parts_of(topology: Topology) -> Mapping[ResourceName, Parts]:
    """Resource that the node offers -> what is listed of it."""
    found: dict[ResourceName, Parts] = {}
    for resource, offers in topology.offers_of.items():
        ids = tuple(topology.devices[resource])
        runs: dict[DeviceID, list[Run]] = {}
        end = 0
        for offer in offers:
            for base in offer.devices:
                start, end = end, end + offer.replicas
                runs.setdefault(topology.card_of(base), []).append(Run(start, end))
        for at, other in enumerate(islice(ids, end, None), end):
            runs.setdefault(topology.card_of(other), []).append(Run(at, at + 1))
        found[resource] = Parts(ids, runs)
    return found


def linked(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    """What the link between two cards is worth; 0 for a card and itself."""
    return pair_score(topology, a, b) if a != b else 0
