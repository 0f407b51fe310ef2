"""
How full cards and nodes are: slots, cores and memory as parts of what there is, each weighted, times ten.

A card of 10 slots, 4 cores and 8192 MiB of which 2, 1 and 2048 are used scores 10 x (0.2 + 0.25 + 0.25) = 7. With a
request for one core and 1024 MiB on top, 10 x (0.3 + 0.5 + 0.375) = 11.75, however many cards it asks for.

Two traps are upstream's, and kept, since they change which card is tried first. The request counts only on cards
whose type is exactly its vendor: with the models of real cards it never does. And a percentage wins over memory here,
while `fit` has it the other way round. The node's score is of what is used before the pod, although upstream's
documentation adds the request.

All arithmetic is in single precision, so that two cards are as full as one another when they are so upstream.

Source: HAMi 4707fb02, scheduling policies.
"""

import struct
from collections.abc import Iterable, Sequence

from topoalign.core.demand.share_annotations import EQUAL_WEIGHTS, Weights
from topoalign.core.demand.shares import UNSET, CardRequest
from topoalign.core.sharing.hami.usage import CardUsage

SCALE = 10.0
_SINGLE = struct.Struct("<f")


def device_score(card: CardUsage, requests: Iterable[CardRequest], weights: Weights = EQUAL_WEIGHTS) -> float:
    """How full a card would be, 0 if it has no slots, no cores or no memory. `requests` are those of one container."""
    if not (card.slots and card.cores and card.memory):
        return 0.0
    slots = card.used_slots
    cores = card.used_cores
    memory = card.used_memory
    for request in requests:
        if request.vendor == card.type:
            slots += 1
            cores += request.cores
            by_percent = request.percent not in (0, UNSET)
            memory += card.memory * request.percent // 100 if by_percent else request.memory
    return _weighted(
        (weights.slot, slots, card.slots), (weights.core, cores, card.cores), (weights.memory, memory, card.memory)
    )


def node_score(cards: Sequence[CardUsage]) -> float:
    """How full a node is, 0 if its cards together have no slots, no cores or no memory."""
    slots = sum(card.slots for card in cards)
    cores = sum(card.cores for card in cards)
    memory = sum(card.memory for card in cards)
    if not (slots and cores and memory):
        return 0.0
    return _weighted(
        (1, sum(card.used_slots for card in cards), slots),
        (1, sum(card.used_cores for card in cards), cores),
        (1, sum(card.used_memory for card in cards), memory),
    )


def _weighted(*parts: tuple[int, int, int]) -> float:
    """Ten times the sum over (weight, used, total), each step rounded to single precision."""
    score = 0.0
    for weight, used, total in parts:
        ratio = _single(_single(used) / _single(total))
        score = _single(score + _single(_single(weight) * ratio))
    return _single(SCALE * score)


def _single(number: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    return rounded
