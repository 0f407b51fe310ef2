"""Machines for tests of the GPU tree: levels as NVML tells them, made of a random hierarchy or of pure chance."""

from hypothesis import strategies as st

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
