"""
Lists alternative sets of devices, with the reason why each was not chosen. `explain` shows them.

Sets of GPUs are compared by the sort key of device policy `topology` (`SetOrder`), even if another policy chose. If
there are more than MOST_COMPARED sets, only the first MOST_COMPARED that differ from the chosen set in a single device
are compared. The best MOST_KEPT are listed. For NICs, only the chosen ones are listed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nsmallest
from itertools import combinations, islice
from math import comb
from typing import Any

from topoalign.core.model.decisions import Considered, PreferenceQuestion
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.placement.gpus.bandwidth import Members
from topoalign.core.placement.gpus.topology import SetOrder, by_topology
from topoalign.core.placement.preference import (
    PLACEMENTS,
    build_gpu_choice,
    has_possible_set,
    positions_by_gpu,
    set_scorer,
)

MOST_COMPARED = 256
"""Maximum number of sets compared. 8 GPUs have 70 sets of 4."""
MOST_KEPT = 5
ALL_OF_THEM = "all that can be had on the NUMA nodes it is aligned to, or from its init containers"


def rank_alternatives(
    topology: Topology,
    resource: ResourceName,
    free: Sequence[DeviceID],
    asked: PreferenceQuestion | None,
    chosen: Sequence[DeviceID],
    near: Sequence[DeviceID],
    placement: str,
    *,
    aligned: bool = False,
) -> tuple[Considered, ...]:
    """
    The chosen set, followed by its best alternatives, the best first. `free`: all devices that the container could have
    been allocated, in the hardware's order. `asked`: the question to the device policy. None: there was nothing to
    choose. `near`: for NICs, the container's GPUs. `aligned`: only the NUMA alignment excluded other free devices.
    """
    kind = topology.kind_of(resource)
    if kind not in ("gpu", "nic") or not chosen:
        return ()
    if kind == "nic":
        score = sum(connection_score(topology, nic, gpu) for nic in chosen for gpu in near)
        why = ALL_OF_THEM if asked is None else "nearest to the container's GPUs" if near else "lowest index"
        return (Considered(resource=resource, devices=tuple(chosen), score=score, chosen=True, why=why),)
    gpus = tuple(topology.gpu_by_id)
    scorer = set_scorer(topology)
    could_have = _gpu_positions(topology, free)
    taken = _gpu_positions(topology, chosen)
    offered = {*_gpu_positions(topology, asked.available if asked is not None else chosen)}
    won = ALL_OF_THEM if asked is None else f"preferred by device policy {placement}"
    order = SetOrder(scorer, could_have)
    difference: Callable[[Members], str] | None = None
    if asked is not None:
        policy = PLACEMENTS[placement]
        choice = build_gpu_choice(topology, asked.available, asked.must_include, asked.size, asked.context)
        won += policy.uncompared(choice) if has_possible_set(choice) else ""
        difference = policy.weigh(choice, taken)
        order = SetOrder(scorer, choice.free.union(could_have), choice.nics)
    cost = _cost_of_alignment(order, could_have, taken) if aligned else ""
    others = _best_others(could_have, taken, order.rank)
    reasons = [won]
    for other in others:
        more = scorer.own(other) - scorer.own(taken)
        reasons.append(
            _explain_lower_score(more, offered.issuperset(other), difference(other) if difference is not None else "")
        )
    return tuple(
        Considered(
            resource=resource,
            devices=tuple(gpus[member] for member in members),
            seam=scorer.describe(members),
            score=scorer.own(members),
            chosen=members == taken,
            why=why,
            alignment_cost=cost if members == taken else "",
        )
        for members, why in zip([taken, *others], reasons, strict=True)
    )


def _best_others(free: Sequence[int], taken: Members, rank: Callable[[Members], Any]) -> list[Members]:
    compared: Iterable[Members] = combinations(free, len(taken))
    if comb(len(free), len(taken)) > MOST_COMPARED:  # those that differ from the chosen set in a single device
        rest = [position for position in free if position not in taken]
        compared = islice((tuple(sorted({*taken, new} - {old})) for old in taken for new in rest), MOST_COMPARED)
    return nsmallest(MOST_KEPT, (members for members in compared if members != taken), key=rank)


def _cost_of_alignment(order: SetOrder, free: Sequence[int], taken: Members) -> str:
    """The stronger seam that is possible without the alignment, for people. Empty: there is none."""
    best = by_topology(order.scorer, free, (), len(taken))
    if order.scorer.seam(best) <= order.scorer.seam(taken):
        return ""
    return f"without the alignment: {order.scorer.describe(best)}"


def _explain_lower_score(more: int, offered: bool, weighed: str = "") -> str:
    """Why another set, whose score is higher by `more`, lost. `weighed`: the device policy's reason, if it has one."""
    if not offered:
        return "not all on the NUMA nodes it is aligned to"
    if weighed:
        return weighed
    if more > 0:
        return f"scores {more} more by itself; the device policy compares something else"
    return "scores the same by itself; the device policy decided" if more == 0 else f"scores {-more} less"


def _gpu_positions(topology: Topology, gpus: Collection[DeviceID]) -> tuple[int, ...]:
    position = positions_by_gpu(topology)
    return tuple(sorted(position[gpu] for gpu in gpus))
