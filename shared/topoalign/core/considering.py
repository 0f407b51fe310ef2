"""
Which other sets of devices could have been chosen, and why they were not: what `explain` shows of a choice.

Only GPUs and NICs are told about; of the devices of foreign plugins no links are known. Of a small choice all sets are
compared, of a large one those that differ from the chosen set in a single device; the best few are kept.
"""

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import combinations
from math import comb

from topoalign.core.decisions import Considered
from topoalign.core.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.placement.scores import link_scores, total
from topoalign.core.topology.model import Topology
from topoalign.core.topology.queries import pair_score

MOST_COMPARED = 256
"""Sets. A choice of 4 among 8 has 70."""
MOST_KEPT = 5


def considered(
    topology: Topology,
    resource: ResourceName,
    free: Sequence[DeviceID],
    offered: Sequence[DeviceID],
    chosen: Sequence[DeviceID],
    near: Sequence[DeviceID],
    placement: str,
) -> tuple[Considered, ...]:
    """
    The chosen set, and then the best of its alternatives in descending order of their scores.

    `free` are all devices the container could have got, in the hardware's order, `offered` those that the device policy
    was asked to choose from (none where there was nothing to choose), `near` the container's GPUs where NICs are chosen.
    """
    if resource not in (GPU, NIC) or not chosen:
        return ()
    taken = tuple(i for i, device in enumerate(free) if device in chosen)
    table = link_scores(topology, free) if resource == GPU else ()
    links = [sum(pair_score(topology, device, other) for other in near) for device in free]

    def score(members: Iterable[int]) -> int:
        return total(table, members) if resource == GPU else sum(links[member] for member in members)

    best = nsmallest(MOST_KEPT, ((-score(members), members) for members in alternatives(len(free), taken)))
    mine = score(taken)
    sets = [(mine, taken)] + [(-negative, members) for negative, members in best]
    return tuple(
        Considered(
            resource=resource,
            devices=(devices := tuple(free[member] for member in members)),
            score=value,
            chosen=members == taken,
            why=reason_for(resource, bool(offered), near, placement)
            if members == taken
            else reason_against(value - mine, {*devices} <= ({*offered} or {*chosen})),
        )
        for value, members in sets
    )


def alternatives(devices: int, taken: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Other sets of the same size, as positions, ascending."""
    if comb(devices, len(taken)) <= MOST_COMPARED:
        return (members for members in combinations(range(devices), len(taken)) if members != taken)
    rest = [position for position in range(devices) if position not in taken]
    return (tuple(sorted({*taken, new} - {old})) for old in taken for new in rest)


def reason_for(resource: ResourceName, asked: bool, near: Sequence[DeviceID], placement: str) -> str:
    if not asked:
        return "all that can be had on the NUMA nodes it is aligned to, or from its init containers"
    if resource == GPU:
        return f"preferred by device policy {placement}"
    return "nearest to the container's GPUs" if near else "lowest index"


def reason_against(more: int, offered: bool) -> str:
    if not offered:
        return "not all on the NUMA nodes it is aligned to"
    if more > 0:
        return f"scores {more} more by itself, but what it leaves is worse by more than that, or it has no link"
    return "scores the same by itself; what it leaves, or its indexes, decided" if more == 0 else f"scores {-more} less"
