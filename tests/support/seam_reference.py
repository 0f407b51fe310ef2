"""
The weakest seam, and the order of sets of GPUs, read sentence by sentence: every division, every link. And machines at
random, whose GPUs have links of few kinds.
"""

from collections.abc import Collection, Sequence
from itertools import combinations
from random import Random

from topoalign.core.placement.gpus.bandwidth import Scores

Table = Sequence[Sequence[int]]
"""Of each pair 100 for each NVLink and the score of the PCIe path; 0 of a GPU and itself."""
PALETTES = {
    "any": range(2000),
    "few": [10, 20, 50, 110, 250],
    "two": [10, 20],
    "rare": [10] * 9 + [100],
    "none": [0, 0, 0, 100],
}


def naive_seam(strength: Table, members: Sequence[int], switch: Sequence[int] = ()) -> tuple[int, int]:
    """
    NVLinks across the weakest division of the set, or 0 and the score of the best PCIe path across. `switch`: the NVLinks of
    each GPU that end at an NVSwitch.
    """
    if len(members) < 2:
        return (0, 0)
    if switch and all(switch[member] for member in members):
        return (min(switch[member] for member in members), 0)
    first, *rest = members
    divisions = [
        ([first, *some], [other for other in rest if other not in some])
        for size in range(len(rest))
        for some in combinations(rest, size)
    ]
    return min(across(strength, one, other) for one, other in divisions)


def across(strength: Table, one: Collection[int], other: Collection[int]) -> tuple[int, int]:
    """What connects two parts: all NVLinks between them, or without any the best PCIe path."""
    pairs = [strength[a][b] for a in one for b in other]
    nvlinks = sum(pair // 100 for pair in pairs)
    return (nvlinks, 0) if nvlinks else (0, max(pairs))


def naive_rank(
    scores: Table,
    strength: Table,
    members: Sequence[int],
    free: Collection[int],
    nics: tuple[int, Sequence[tuple[Collection[int], Collection[int]]]] = (0, ()),
    switch: Sequence[int] = (),
) -> tuple[object, ...]:
    """
    What sorts sets of one size, the best first. `nics`: how many are wanted, and of each that is free the GPUs that it is
    local to, and those that it is near.
    """
    wanted, localities = nics
    nvlinks, pcie = naive_seam(strength, members, switch)
    local = min(wanted, sum(1 for each, _ in localities if {*each} & {*members}))
    near = min(wanted, sum(1 for _, each in localities if {*each} & {*members}))
    cut = sum(scores[a][b] for a in members if a in free for b in free if b not in members)
    own = sum(scores[a][b] for a, b in combinations(members, 2))
    return ((-nvlinks, -pcie), (-local, -near), cut, -own, tuple(members))


def at_random(random: Random, devices: int, palette: str) -> Scores:
    scores = [[0] * devices for _ in range(devices)]
    for a, b in combinations(range(devices), 2):
        scores[a][b] = scores[b][a] = random.choice(PALETTES[palette])
    return scores
