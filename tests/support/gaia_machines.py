"""Machines for tests of the GPU tree: levels as NVML tells them, made of a random hierarchy or of pure chance."""

from itertools import combinations

from hypothesis import strategies as st
from shared_gpu_support import shared_gpu

from topoalign.core.sharing.shared_gpus import SharedGpu

BLOCK = 2**28
LEVELS = (10, 20, 30, 40, 50)
Levels = list[list[int]]


@st.composite
def hierarchies(draw: st.DrawFn, most: int = 8) -> Levels:
    """Levels of cards that are grouped, groups of which are grouped again, and so on, each time on a higher level."""
    count = draw(st.integers(1, most))
    levels = [[0] * count for _ in range(count)]
    groups = [[card] for card in draw(st.permutations(range(count)))]
    for level in LEVELS:
        joined: list[list[int]] = []
        for group in groups:
            if joined and draw(st.booleans()) | (level == LEVELS[-1]):
                for a in joined[-1]:
                    for b in group:
                        levels[a][b] = levels[b][a] = level
                joined[-1] = joined[-1] + group
            else:
                joined.append(group)
        groups = joined
    return levels


@st.composite
def odd_levels(draw: st.DrawFn, most: int = 7) -> Levels:
    """Levels that make no tree, some of them unknown to NVML."""
    count = draw(st.integers(0, most))
    levels = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        levels[a][b] = levels[b][a] = draw(st.sampled_from([0, 15, 60, -1, *LEVELS]))
    return levels


@st.composite
def card_lists(draw: st.DrawFn, count: int) -> list[SharedGpu]:
    """Cards of which something may be held, with shuffled minors."""
    minors = draw(st.permutations(range(count)))
    return [draw(cards(index, minor)) for index, minor in enumerate(minors)]


@st.composite
def cards(draw: st.DrawFn, index: int, minor: int) -> SharedGpu:
    """A card with few different amounts, so that many cards are equal."""
    cores, memory = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 1), (30, 1), (30, 2), (80, 3), (100, 4)]))
    return shared_gpu(
        index,
        4 * BLOCK + draw(st.sampled_from([0, 1])),
        cores,
        memory * BLOCK,
        minor=minor,
        usable=draw(st.integers(0, 9)) > 0 and (cores < 100 or draw(st.booleans())),
        processes=draw(st.integers(0, 1)),
    )
