"""
best-effort: the best connected GPUs, without spoiling what is left for the next container.

A node's GPUs are not equal to one another: two of them may share an NVLink, a PCIe switch, a socket or nothing but the
machine. Taking the best set of four may break up the best pairs, so whole ways of splitting the free GPUs are compared.

The rule (go-gpuallocator 876e7b7, bestEffort): split all free GPUs into sets of the size asked for, with what is left
over as one smaller set, so that the scores of all sets add up to the most; all required GPUs lie in one set of full
size. Of such a split the best set is the answer; of equals the one with the lowest indexes, so that no tie is left to
chance. Two defects of the original are not copied: an answer with a hole in it, and a kept split that is overwritten.

Up to 16 GPUs the answer is exact: what a set of GPUs can be split into is worked out once for each subset that occurs.
With more, nothing is promised beyond a good set: the best of those that grow from each GPU by the one that adds most.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations

from topoalign.core.placement.scores import Scores, total

MOST_EXACT = 16
"""GPUs. A fifth of a second in the worst case; 8 GPUs take a quarter of a millisecond."""


def best_effort(scores: Scores, available: Sequence[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """A set of `size` of the available positions, ascending, that holds all required ones."""
    free = sorted(available)
    if size == len(free):
        return tuple(free)
    if size == 1:
        return tuple(required) or (free[0],)
    if len(free) > MOST_EXACT:
        return grown(scores, free, required, size)
    local = [[scores[a][b] for b in free] for a in free]
    chosen = split_best(local, [free.index(position) for position in required], size)
    return tuple(free[position] for position in chosen)


def split_best(scores: Scores, required: Sequence[int], size: int) -> tuple[int, ...]:
    """The best set of a best split of all positions of the table."""
    everything = (1 << len(scores)) - 1
    worth = set_scores(scores)

    @cache
    def whole(mask: int) -> int:
        """The most that a split into sets of exactly `size` adds up to."""
        if not mask:
            return 0
        lowest = mask & -mask
        return max(worth[part | lowest] + whole(mask ^ part ^ lowest) for part in parts(mask ^ lowest, size - 1))

    @cache
    def split(mask: int) -> int:
        """The same with one smaller set of what is left over."""
        left_over = mask.bit_count() % size
        if not left_over:
            return whole(mask)
        return max(worth[part] + whole(mask ^ part) for part in parts(mask, left_over))

    fixed = sum(1 << position for position in required)
    holding = [part | fixed for part in parts(everything ^ fixed, size - len(required))]
    if not fixed:
        # Any best split will do: the best set of all that are in one comes up first.
        most = split(everything)
        ranked = sorted(holding, key=lambda part: (-worth[part], positions(part)))
        return positions(next(part for part in ranked if worth[part] + split(everything ^ part) == most))
    best = max(worth[part] + split(everything ^ part) for part in holding)
    ranked = [part for part in holding if worth[part] + split(everything ^ part) == best]
    return positions(min(ranked, key=lambda part: (-worth[part], positions(part))))


def set_scores(scores: Scores) -> list[int]:
    """The score of every subset, by its mask: adding a GPU adds its links to those that are there."""
    worth = [0]
    for position, row in enumerate(scores):
        links = [0]
        for other in row[:position]:
            links += [other + smaller for smaller in links]
        worth += [had + new for had, new in zip(worth, links, strict=True)]
    return worth


def parts(mask: int, size: int) -> Iterator[int]:
    """The subsets of a mask that have this size, in the order of their lowest members."""
    return map(sum, combinations([1 << position for position in positions(mask)], size))


def positions(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def grown(scores: Scores, free: Sequence[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """The best of the sets that grow from the required positions, or from each position, by what adds most."""
    seeds: Iterable[list[int]] = [sorted(required)] if required else [[position] for position in free]
    sets = [tuple(sorted(grow(scores, free, seed, size))) for seed in seeds]
    return min(sets, key=lambda members: (-total(scores, members), members))


def grow(scores: Scores, free: Sequence[int], seed: list[int], size: int) -> list[int]:
    members = list(seed)
    gain = {position: sum(scores[position][member] for member in members) for position in free if position not in seed}
    while len(members) < size:
        added = min(gain, key=lambda position: (-gain[position], position))
        members.append(added)
        del gain[added]
        row = scores[added]
        gain = {position: had + row[position] for position, had in gain.items()}
    return members
