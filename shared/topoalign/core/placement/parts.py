"""
Which shares, MIG instances or virtual functions a container gets.

They are chosen one by one, from the card of which the fewest are held (`distributed`) or the most (`packed`), counting those
chosen already; of equals from the card that this container has the fewest of, then from the nearest to the cards that it
has, then in the hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which leaves the rest to
chance.
"""

from collections import Counter
from collections.abc import Sequence

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score


def prefer_parts(
    topology: Topology,
    resource: ResourceName,
    available: Sequence[DeviceID],
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
    listed = topology.devices[resource]
    free, required = frozenset(available), frozenset(must_include)
    cards = {device: topology.card_of(device) for device in listed}
    left: dict[DeviceID, list[DeviceID]] = {}
    held: Counter[DeviceID] = Counter()
    for device in listed:
        left.setdefault(cards[device], [])
        if device not in free or device in required:
            held[cards[device]] += 1
        else:
            left[cards[device]].append(device)
    sign = -1 if any(offer.packing == "packed" for offer in topology.offers_of[resource]) else 1
    taken: Counter[DeviceID] = Counter(cards[device] for device in required)
    others = [topology.card_of(device) for device in near]
    links = {card: sum(linked(topology, card, other) for other in (*others, *taken)) for card in left}
    order = {card: place for place, card in enumerate(left)}
    chosen = set(required)
    while len(chosen) < size:
        card = min(
            (card for card, devices in left.items() if devices),
            key=lambda card: (sign * held[card], taken[card], -links[card], order[card]),
        )
        chosen.add(left[card].pop(0))
        if not taken[card]:
            links = {other: links[other] + linked(topology, other, card) for other in links}
        held[card] += 1
        taken[card] += 1
    return tuple(device for device in listed if device in chosen)


def linked(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    """What the link between two cards is worth; 0 for a card and itself."""
    return pair_score(topology, a, b) if a != b else 0
