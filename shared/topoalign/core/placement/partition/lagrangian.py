"""
Finds the best partition of up to 18 devices of any structure, by prices (Lagrangian relaxation).

Give each device a price. A set then costs what the prices of its devices exceed its score by, and whatever the prices
are, no partition is worth more than all prices together less the cheapest sets there are, as many as a partition has.
That is a bound (the Lagrangian relaxation of "each device is in exactly one set"). It falls when devices that are in
several of the cheapest sets get dearer and devices in none of them get cheaper.

A set that is dearer than the cheapest ones by more than x is in no partition worth more than the bound less x. So
little is left to be put together in every way (`Cover`): first with a small x, and if no partition that good is found,
with a larger.

Most steps look only at the sets that were among the cheapest before; after some of them all sets are looked at again.
Scores and prices are whole numbers of 64ths of a point, so that nothing depends on rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from itertools import chain
from operator import add, itemgetter, sub
from typing import NamedTuple

from topoalign.core.placement.gpus.seam import Scores, total_score
from topoalign.core.placement.partition.cover import Cover
from topoalign.core.placement.partition.greedy import exchange_devices, grow_partition
from topoalign.core.placement.partition.masks import (
    by_preference,
    mask_members,
    masks_of_size,
    set_scores,
    sums_by_mask,
)
from topoalign.core.placement.partition.search_budget import PartitionSearchBudget

MOST_PRICED = 18
"""Devices. Each more doubles the number of sets."""
PARTS = 64
"""Of a point."""
ROUNDS = 12
"""In which all sets are looked at. Most searches need half of them."""
STEPS = 30
"""In each round, on the cheapest sets so far."""
CHEAPEST = 100
"""Sets of each kind that a round adds to these."""
IDLE_ROUNDS = 3
"""Without a lower bound: then it does not get lower."""
INERTIA = 0.6
"""How much of the last step's direction the next one keeps."""


class SetKind(NamedTuple):
    """Sets of which every partition has the same number, with their scores."""

    masks: tuple[int, ...]
    scores: list[int]
    number: int
    sums: Callable[[Sequence[int]], list[int]]
    """Adds up the prices of the devices of each set."""

    def costs(self, prices: Sequence[int]) -> list[int]:
        """The cost of each set: the prices of its devices less its score."""
        return list(map(sub, self.sums(prices), self.scores))

    def only(self, numbers: Iterable[int]) -> "SetKind":
        """The kind with only the sets at these positions."""
        chosen = [*numbers]
        masks = tuple(self.masks[each] for each in chosen)
        return SetKind(masks, [self.scores[each] for each in chosen], self.number, sums_of(masks))


class Bound(NamedTuple):
    """An upper bound at some prices: no partition is worth more than `value`, in 64ths of a point."""

    value: int
    prices: list[int]
    costs: list[list[int]]
    """Of the sets of each kind."""


def best_by_prices(scores: Scores, required: int, size: int, work: PartitionSearchBudget) -> tuple[int, int]:
    """
    Finds the chosen set, as a mask, and the total; `required` is a mask, too.

    Raises TooMuchWork where too many sets are left to combine, as in a machine with much symmetry and no tree.
    """
    devices = len(scores)
    worth = set_scores(scores)
    kinds = group_sets(worth, devices, required, size)
    fixed = mask_members(required, devices)
    start = exchange_devices(scores, grow_partition(scores, fixed, size), fixed, guarded=False)
    target = PARTS * sum(total_score(scores, members) for members in start)
    home = {device: members for members in start for device in members}
    halves = [PARTS * sum(scores[device][other] for other in home[device]) // 2 for device in range(devices)]
    bound = lowest_bound(kinds, halves, target)
    return put_together(kinds, bound, target, size, worth, work)


def group_sets(worth: Sequence[int], devices: int, required: int, size: int) -> list[SetKind]:
    """The sets that can be in a partition, by kind; the chosen set is of the first kind."""
    full, left_over = divmod(devices, size)
    sets = masks_of_size(devices, size)
    rests = masks_of_size(devices, left_over)
    if required:
        holding = tuple(mask for mask in sets if mask & required == required)
        without = tuple(mask for mask in sets if not mask & required)
        rests = tuple(mask for mask in rests if not mask & required)
        offered = [(holding, 1), (without, full - 1), (rests, int(left_over > 0))]
    else:
        offered = [(sets, full), (rests, int(left_over > 0))]
    return [
        SetKind(masks, [PARTS * worth[mask] for mask in masks], number, sums_of(masks))
        for masks, number in offered
        if number
    ]


def sums_of(masks: Sequence[int]) -> Callable[[Sequence[int]], list[int]]:
    """Makes a function that adds up the values of each mask's devices: two look-ups, one for either half of them."""
    padded = (*masks, 0, 0)
    half = max(padded).bit_length() // 2
    upper = itemgetter(*(mask >> half for mask in padded))
    lower = itemgetter(*(mask & (1 << half) - 1 for mask in padded))

    def sums(values: Sequence[int]) -> list[int]:
        by_bit = values[::-1]
        return list(map(add, upper(sums_by_mask(by_bit[half:])), lower(sums_by_mask(by_bit[:half]))))[:-2]

    return sums


def lowest_bound(kinds: Sequence[SetKind], prices: list[int], target: int) -> Bound:
    """The lowest bound that a few rounds of changing prices find; `target` is what some partition is worth."""
    best = bound_at(kinds, prices)
    pools: list[dict[int, None]] = [{} for _ in kinds]
    latest = best
    idle = 0
    for _ in range(ROUNDS):
        if best.value - target < PARTS or idle == IDLE_ROUNDS:
            break
        for pool, costs in zip(pools, latest.costs, strict=True):
            pool.update(dict.fromkeys(cheapest(costs, CHEAPEST)))
        some = [kind.only(pool) for kind, pool in zip(kinds, pools, strict=True)]
        latest = bound_at(kinds, lowered(some, best.prices, target))
        idle = 0 if best.value - latest.value >= PARTS else idle + 1
        best = min(best, latest, key=lambda bound: bound.value)
    return best


def bound_at(kinds: Iterable[SetKind], prices: list[int]) -> Bound:
    """The bound at these prices: their sum less the cheapest sets, as many as a partition has."""
    costs = [kind.costs(prices) for kind in kinds]
    least = sum(sum(nsmallest(kind.number, of_kind)) for kind, of_kind in zip(kinds, costs, strict=True))
    return Bound(sum(prices) - least, prices, costs)


def lowered(kinds: Sequence[SetKind], prices: list[int], target: int) -> list[int]:
    """Prices with a lower bound for these sets: subgradient steps with inertia, while the gap allows."""
    devices = len(prices)
    members = [[mask_members(mask, devices) for mask in kind.masks] for kind in kinds]
    direction = [0.0] * devices
    best = prices
    best_value = sum(prices) * 2
    scale = 1.0
    stalled = 0
    for _ in range(STEPS):
        bound = bound_at(kinds, prices)
        cover = [-1] * devices
        for kind, of_kind, costs in zip(kinds, members, bound.costs, strict=True):
            for number in cheapest(costs, kind.number):
                for device in of_kind[number]:
                    cover[device] += 1
        stalled += 1
        if bound.value < best_value:
            best = prices
            best_value = bound.value
            stalled = 0
        if bound.value <= target or not any(cover):
            break
        if stalled == 5:
            scale = scale / 2
            stalled = 0
        direction = [step + INERTIA * earlier for step, earlier in zip(cover, direction, strict=True)]
        length = scale * (bound.value - target) / (sum(along * along for along in direction) or 1.0)
        prices = [price + round(length * along) for price, along in zip(prices, direction, strict=True)]
    return best


def cheapest(costs: Sequence[int], number: int) -> list[int]:
    """The positions of the lowest costs, at most `number` of them."""
    return nsmallest(number, range(len(costs)), key=costs.__getitem__)


def put_together(
    kinds: Sequence[SetKind], bound: Bound, target: int, size: int, worth: Sequence[int], work: PartitionSearchBudget
) -> tuple[int, int]:
    """Finds the chosen set and the total among the sets that cost little enough. Raises TooMuchWork."""
    everything = len(worth) - 1
    dearest = [nsmallest(kind.number, costs)[-1] for kind, costs in zip(kinds, bound.costs, strict=True)]
    allowed = (bound.value - target) // 16 + 1
    while True:
        kept = [
            [mask for mask, cost in zip(kind.masks, costs, strict=True) if cost <= most + allowed]
            for kind, costs, most in zip(kinds, bound.costs, dearest, strict=True)
        ]
        cover = Cover(chain.from_iterable(kept), size, worth, work)
        totals = {mask: worth[mask] + rest for mask in kept[0] if (rest := cover.most(everything ^ mask)) is not None}
        greatest = max(totals.values(), default=None)
        if greatest is not None and bound.value - PARTS * greatest <= allowed:
            best = (mask for mask, points in totals.items() if points == greatest)
            return by_preference(worth, best), greatest
        allowed *= 2
