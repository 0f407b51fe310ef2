"""
Which shares, MIG instances or virtual functions a container gets.

They are chosen one by one, from the card of which the fewest are held (`distributed`) or the most (`packed`), counting those
chosen already; of equals from the card that this container has the fewest of, then from the nearest to the cards that it
has, then in the hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which leaves the rest to
chance.

A node may offer thousands of shares, and one of them is wanted. The free ones are therefore marked in a byte for each
place, in which the parts of a card follow one another: how many are free of a card, and which is the first of them, is
counted and searched in bytes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score, places_of
from topoalign.core.model.topology.views import made_once

FREE = b"\1"


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
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    near: Sequence[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """
    The `size` of them that are best, in the hardware's order; `near` are other devices of the container.

    () where there is no preference to give: size below 1 or above what is available, or too small for `must_include`.
    """
    if not max(1, len(must_include)) <= size <= len(available):
        return ()
    ids, runs = parts_of(topology)[resource]
    place = places_of(topology)[resource].__getitem__
    chosen = {*map(place, must_include)}
    free = bytearray(len(ids))
    for at in map(place, available):
        free[at] = 1
    for at in chosen:
        free[at] = 0
    left = {card: sum(free.count(FREE, *run) for run in mine) for card, mine in runs.items()}
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
        at = next(at for run in runs[card] if (at := free.find(FREE, *run)) >= 0)
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
