"""Machines at random, and the best partition found by walking through all of them: what the searches are held against."""

from collections.abc import Collection, Iterator
from itertools import combinations
from random import Random

from topoalign.core.placement.gpus.seam import Scores, total_score

Split = list[tuple[int, ...]]


def splits(free: tuple[int, ...], size: int) -> Iterator[Split]:
    """Every way to split these into sets of a size, and one smaller set of what is left over (the last)."""
    left_over = len(free) % size
    for rest in combinations(free, left_over):
        whole = tuple(gpu for gpu in free if gpu not in rest)
        for sets in equal_splits(whole, size):
            yield [*sets, rest]


def equal_splits(free: tuple[int, ...], size: int) -> Iterator[Split]:
    if not free:
        yield []
        return
    for others in combinations(free[1:], size - 1):
        for sets in equal_splits(tuple(gpu for gpu in free[1:] if gpu not in others), size):
            yield [(free[0], *others), *sets]


def walked(scores: Scores, free: tuple[int, ...], required: Collection[int], size: int) -> tuple[tuple[int, ...], int]:
    """The same with the points of the split."""
    best: list[tuple[int, int, tuple[int, ...]]] = []
    for split in splits(free, size):
        points = sum(total_score(scores, members) for members in split)
        best += [(-points, -total_score(scores, each), each) for each in split[:-1] if {*required} <= {*each}]
    points, _, members = min(best)
    return members, -points


PALETTES = {
    "any": range(2000),
    "few": [10, 20, 50, 110, 250],
    "two": [10, 20],
    "rare": [10] * 9 + [100],
    "none": [0, 0, 0, 100],
}


def at_random(random: Random, devices: int, palette: str) -> Scores:
    scores = [[0] * devices for _ in range(devices)]
    for a, b in combinations(range(devices), 2):
        scores[a][b] = scores[b][a] = random.choice(PALETTES[palette])
    return scores
