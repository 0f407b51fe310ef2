"""
Which shares, MIG instances or virtual functions a container gets.

They are chosen one by one, from the card of which the fewest are held (`distributed`) or the most (`packed`), counting those
chosen already; of equals from the card that this container has the fewest of, then from the nearest to the cards that it
has, then in the hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which leaves the rest to
chance.

A node may offer thousands of shares, and few of them are wanted. So those of each card are counted (`device_sets`), and of
a chosen card the first ones are taken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.derived_tables import made_once
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score


def prefer_parts(
    topology: Topology,
    resource: ResourceName,
    available: DeviceSet,
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
    chosen = available.devices.some(must_include)
    cards = listed_parts(topology)[resource]
    left = {card: available & parts - chosen for card, parts in cards.items()}
    free = {card: len(parts) for card, parts in left.items()}
    held = {card: len(parts) - free[card] for card, parts in cards.items()}
    sign = -1 if any(offer.packing == "packed" for offer in topology.offers_of[resource]) else 1
    taken: Counter[DeviceID] = Counter(map(topology.card_of, chosen))
    others = [topology.card_of(device) for device in near]
    links = {card: sum(linked(topology, card, other) for other in (*others, *taken)) for card in cards}
    order = {card: index for index, card in enumerate(cards)}
    more: Counter[DeviceID] = Counter()
    for _ in range(size - len(chosen)):
        card = min(
            (card for card, count in free.items() if count),
            key=lambda card: (sign * held[card], taken[card], -links[card], order[card]),
        )
        if not taken[card]:
            links = {other: links[other] + linked(topology, other, card) for other in links}
        free[card] -= 1
        held[card] += 1
        taken[card] += 1
        more[card] += 1
    for card, amount in more.items():
        chosen |= left[card].first(amount)
    return tuple(chosen)


@made_once
def listed_parts(topology: Topology) -> Mapping[ResourceName, Mapping[DeviceID, DeviceSet]]:
    """Resource that the node offers -> card -> its parts that are listed, in the hardware's order."""
    found: dict[ResourceName, dict[DeviceID, DeviceSet]] = {}
    for resource in topology.offers_of:
        devices = topology.devices[resource]
        cards = found.setdefault(resource, {})
        for base, parts in devices.by_base.items():
            card = topology.card_of(base)
            cards[card] = cards.get(card, devices.nothing) | parts
    return found


def linked(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    """What the link between two cards is worth; 0 for a card and itself."""
    return connection_score(topology, a, b) if a != b else 0
