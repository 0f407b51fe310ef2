"""
Streams of pods with 1 to 8 GPUs that arrive at one node and leave it, and the GPUs that a device policy gives them.

Before a pod arrives, pods that are drawn at random leave until its GPUs are free and less than `load` of the machine is in
use. Which pods come and go depends on the seed alone, so all policies get the same pods.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from random import Random

from topoalign.core.placement.gpus.bandwidth import Members, SetScorer
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.preference import PLACEMENTS

SIZES = (1, 2, 3, 4, 6, 8)
WEIGHTS = (0.3, 0.25, 0.1, 0.2, 0.05, 0.1)
"""How many GPUs pods ask for, and how often."""
PODS = 400
"""Of one stream."""
LOADS = (0.7, 0.85, 0.95)
"""Of the streams with the seeds 0, 1 and 2."""
RANDOM = "random"
"""Takes GPUs by chance, to compare with."""

Choose = Callable[[Members, int], Members]
"""The set of so many of the free GPUs that a container gets."""


def chooser(scorer: SetScorer, placement: str, seed: int = 0) -> Choose:
    """The choice of a device policy among the free GPUs, under topology policy `none`."""
    chance = Random(seed)

    def choose(free: Members, size: int) -> Members:
        if placement == RANDOM:
            return tuple(sorted(chance.sample(free, size)))
        return PLACEMENTS[placement].choose(GpuChoice(scorer, free, (), size, frozenset(free)))

    return choose


def granted(gpus: int, seed: int, choose: Choose) -> Iterator[Members]:
    """The set of GPUs of each pod of a stream, for pods with at least two."""
    chance = Random(seed)
    load = LOADS[seed % len(LOADS)]
    free = frozenset(range(gpus))
    live = list[Members]()
    sizes = [size for size in SIZES if size <= gpus]
    for _ in range(PODS):
        size = chance.choices(sizes, WEIGHTS[: len(sizes)])[0]
        while live and (len(free) < size or gpus - len(free) >= load * gpus):
            free |= {*live.pop(chance.randrange(len(live)))}
        members = choose(tuple(sorted(free)), size)
        free -= {*members}
        live.append(members)
        if size > 1:
            yield members


def filling(gpus: int, seed: int) -> list[int]:
    """The sizes of pods that fill a machine, in a random order."""
    chance = Random(seed)
    left = gpus
    sizes = list[int]()
    while left:
        sizes.append(chance.choices(SIZES, WEIGHTS)[0])
        if sizes[-1] > left:
            sizes.pop()
        left = gpus - sum(sizes)
    return sizes


def sum_of_choices(gpus: int, sizes: Sequence[int], choose: Choose, worth: Callable[[Members], float]) -> float:
    """What the sets are worth together that pods of these sizes get, one after another."""
    free = frozenset(range(gpus))
    found = 0.0
    for size in sizes:
        members = choose(tuple(sorted(free)), size)
        free -= {*members}
        found += worth(members) if size > 1 else 0.0
    return found


def best_sum(gpus: int, sizes: Sequence[int], worth: Callable[[Members], float]) -> float:
    """The most that the sets can be worth together, proven by a look at all ways. For up to nine GPUs."""

    @cache
    def best(free: Members, at: int) -> float:
        if at == len(sizes):
            return 0.0
        size = sizes[at]
        return max(
            (worth(members) if size > 1 else 0.0) + best(tuple(gpu for gpu in free if gpu not in members), at + 1)
            for members in combinations(free, size)
        )

    return best(tuple(range(gpus)), 0)
