"""Machines at random, and the best partition found by walking through all of them: what the searches are held against."""

from collections.abc import Collection, Iterator
from itertools import combinations
from random import Random

from topoalign.core.placement.gpus.bandwidth import Scores, total_score

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


def by_walk(scores: Scores, free: tuple[int, ...], required: Collection[int], size: int) -> tuple[int, ...]:
    """The best set of full size with the required ones, of all splits with the most points, the lowest of equals."""
    return walked(scores, free, required, size)[0]


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


def hierarchical(random: Random, devices: int) -> Scores:
    """Blocks in blocks, equal or not, of devices side by side or strewn over the machine."""
    scores = [[0] * devices for _ in range(devices)]

    def fill(members: list[int], value: int) -> None:
        if len(members) < 2:
            return
        number = random.randint(2, len(members))
        if random.random() < 0.6:
            parts = [members[len(members) * i // number : len(members) * (i + 1) // number] for i in range(number)]
        else:
            parts = [members[i::number] for i in range(number)]
        for part, other in combinations(parts, 2):
            for a in part:
                for b in other:
                    scores[a][b] = scores[b][a] = value
        steps = (
            [random.choice([10, 100])] * number if random.random() < 0.6 else random.choices([10, 20, 100], k=number)
        )
        for part, step in zip(parts, steps, strict=True):
            fill(part, value + step)

    order = list(range(devices))
    if random.random() < 0.5:
        random.shuffle(order)
    fill(order, random.choice([0, 10]))
    return scores


def any_machine(random: Random, devices: int) -> Scores:
    kind = random.choice([*PALETTES, "tree"])
    return hierarchical(random, devices) if kind == "tree" else at_random(random, devices, kind)
