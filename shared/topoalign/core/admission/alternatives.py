"""
Which other sets of devices could have been chosen, and why they were not: what `explain` shows of a choice.

Only GPUs and NICs are told about; of the devices of foreign plugins no links are known. Of a small choice all sets are
compared, of a large one those that differ from the chosen set in a single device; the best few are kept.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from itertools import combinations
from math import comb

from topoalign.core.model.decisions import Considered, PreferenceQuestion
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Kind
from topoalign.core.model.topology.queries import pair_score
from topoalign.core.placement.gpus.scores import Table, scores_among, total, totals
from topoalign.core.placement.preference import PLACEMENTS, can_be_met, gpu_choice

MOST_COMPARED = 256
"""Sets. A choice of 4 among 8 has 70."""
MOST_KEPT = 5

Members = tuple[int, ...]
"""A set of devices, as positions among those that are free, ascending."""
Scored = tuple[int, Members]


def considered(
    topology: Topology,
    resource: ResourceName,
    free: Sequence[DeviceID],
    asked: PreferenceQuestion | None,
    chosen: Sequence[DeviceID],
    near: Sequence[DeviceID],
    placement: str,
) -> tuple[Considered, ...]:
    """
    The chosen set, and then the best of its alternatives in descending order of their scores.

    `free` are all devices the container could have got, in the hardware's order, `asked` is what the device policy was asked
    (None where there was nothing to choose), `near` the container's GPUs where NICs are chosen.
    """
    kind = topology.kind_of(resource)
    if kind not in ("gpu", "nic") or not chosen:
        return ()
    taken = tuple(i for i, device in enumerate(free) if device in chosen)
    table = scores_among(topology, free) if kind == "gpu" else ()
    sets = sets_by_links(table, taken) if kind == "gpu" else sets_by_nearness(nearness_of(topology, free, near), taken)
    offered = () if asked is None else asked.available
    won = reason_for(kind, bool(offered), near, placement)
    difference: Callable[[Sequence[DeviceID]], str] = unweighed
    if kind == "gpu" and asked is not None:
        policy = PLACEMENTS[placement]
        choice = gpu_choice(topology, asked.available, asked.must_include, asked.size, asked.beside)
        won += policy.uncompared(choice) if can_be_met(choice) else ""
        difference = weighed_against(topology, policy.weigh(choice, positions(topology, chosen)))
    mine = sets[0][0]
    return tuple(
        Considered(
            resource=resource,
            devices=(devices := tuple(free[member] for member in members)),
            score=value,
            chosen=members == taken,
            why=won
            if members == taken
            else reason_against(value - mine, {*devices} <= ({*offered} or {*chosen}), difference(devices)),
        )
        for value, members in sets
    )


def nearness_of(topology: Topology, devices: Sequence[DeviceID], near: Sequence[DeviceID]) -> list[int]:
    """What the links of each device to these near ones are worth."""
    return [sum(pair_score(topology, device, other) for other in near) for device in devices]


def sets_by_links(table: Table, taken: Members) -> list[Scored]:
    """`best_sets` by the links among the members."""
    devices, mine = len(table), total(table, taken)
    if comb(devices, len(taken)) <= MOST_COMPARED:
        return best_sets(mine, taken, totals(table, len(taken)), combinations(range(devices), len(taken)))
    others = neighbours(devices, taken)
    return best_sets(mine, taken, [total(table, each) for each in others], others)


def sets_by_nearness(links: Sequence[int], taken: Members) -> list[Scored]:
    """`best_sets` by the links of each member to other devices."""
    devices, mine = len(links), sum(links[member] for member in taken)
    if comb(devices, len(taken)) <= MOST_COMPARED:
        sums = list(map(sum, combinations(links, len(taken))))
        return best_sets(mine, taken, sums, combinations(range(devices), len(taken)))
    others = neighbours(devices, taken)
    return best_sets(mine, taken, [sum(links[member] for member in each) for each in others], others)


def best_sets(mine: int, taken: Members, scores: Sequence[int], sets: Iterable[Members]) -> list[Scored]:
    """The set that was taken, and the best few of the others; of equals those of the lowest positions."""
    least = nlargest(MOST_KEPT + 1, scores)[-1]  # one more than are kept: the set that was taken may be among them
    good = zip(scores, sets, strict=True)
    best = sorted((-score, members) for score, members in good if score >= least and members != taken)
    return [(mine, taken), *((-negative, members) for negative, members in best[:MOST_KEPT])]


def neighbours(devices: int, taken: Members) -> list[Members]:
    """The sets that differ from the one taken in a single device."""
    rest = [position for position in range(devices) if position not in taken]
    return [tuple(sorted({*taken, new} - {old})) for old in taken for new in rest]


def unweighed(devices: Sequence[DeviceID]) -> str:
    """What other device policies than `topology` hold against a set: nothing that they could tell."""
    return ""


def reason_for(kind: Kind, asked: bool, near: Sequence[DeviceID], placement: str) -> str:
    """Why the chosen set won. `asked`: whether the device policy had a choice."""
    if not asked:
        return "all that can be had on the NUMA nodes it is aligned to, or from its init containers"
    if kind == "gpu":
        return f"preferred by device policy {placement}"
    return "nearest to the container's GPUs" if near else "lowest index"


def reason_against(more: int, offered: bool, weighed: str = "") -> str:
    """Why another set lost, which scores this much `more`; `weighed` is what the device policy says, if anything."""
    if not offered:
        return "not all on the NUMA nodes it is aligned to"
    if weighed:
        return weighed
    if more > 0:
        return f"scores {more} more by itself, but what it leaves is worse by more than that, or it has no link"
    return "scores the same by itself; what it leaves, or its indexes, decided" if more == 0 else f"scores {-more} less"


def positions(topology: Topology, gpus: Sequence[DeviceID]) -> tuple[int, ...]:
    """The GPUs by their positions on the machine, ascending."""
    position = {gpu: i for i, gpu in enumerate(topology.gpu_by_id)}
    return tuple(sorted(position[gpu] for gpu in gpus))


def weighed_against(topology: Topology, weigh: Callable[[tuple[int, ...]], str]) -> Callable[[Sequence[DeviceID]], str]:
    """What a device policy holds against a set of GPUs, by their ids."""
    return lambda gpus: weigh(positions(topology, gpus))
