"""The weakest seam, and the order of sets of GPUs, read sentence by sentence: every division, every link."""

from collections.abc import Collection, Sequence
from itertools import combinations

Table = Sequence[Sequence[int]]
"""Of each pair 100 for each NVLink and the score of the PCIe path; 0 of a GPU and itself."""


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
