"""
Whether a kubelet would admit pods in whatever order they come to it.

A kubelet admits pods in the order in which it hears of them, which is not that in which they were bound. So a pod is bound
beside pods that a node has not shown yet only if all of them are admitted in every order: two pods that fit one after the
other may not fit the other way round, where the first one takes CPUs of two NUMA nodes. And pods may end before: that gives
room to those that come, and one of them may then be aligned to NUMA nodes that another was to get (`realignment`).

And a kubelet does not say for which pod it asks. Pods that ask for the same are interchangeable; a pod whose annotations are
about its devices is bound beside no other one that asks for as many GPUs, until that one is shown; a pod with units of GPUs
beside no other one that asks for as much of one kind and for something else of the other, and one with slots beside no other
one that asks for as many and for other amounts, or by other annotations (`are_mistakable`).

A pod that must have the slots that are reserved for it is also to be aligned to the same NUMA nodes in every order:
elsewhere the node refuses it. Example: a pod for GPU-0 or GPU-2 with 4 CPUs comes after one with as many. The two fit in
both orders, but where it comes first it is aligned to the NUMA node of GPU-0, and GPU-2 is reserved for it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from topoalign.core.admission.admit import decide
from topoalign.core.admission.feasibility import Need
from topoalign.core.admission.free_amounts import free_of
from topoalign.core.admission.realignment import Steps, Waiting, fit_whatever_ends, left_elsewhere
from topoalign.core.admission.reserving import has_its_own
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.slots import SlotShare, slots_asked
from topoalign.core.demand.units import InvalidShare, Share, share_of
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.state.fold import NodeState
from topoalign.runtime.turns import Turns

MOST_PENDING = 3
"""Pods that are tried in every order, besides the one that is to be bound: 64 decisions where no two are alike."""


Place = tuple[object, tuple[tuple[int, ...] | None, ...]]
"""What a pod asks for, and the NUMA nodes to which its containers with slots are aligned; None: the policy does not say."""
Ends = frozenset[tuple[Place, int]]
"""How often pods are aligned so that must have what is reserved for them, after one order of all pods."""


class Comer(NamedTuple):
    """A pod that a kubelet will admit or refuse."""

    key: object
    """Equal for pods that ask for the same: their order among one another does not matter."""
    demand: PodDemand
    """Under a name that no other one has."""
    must_fit: bool
    """Whether all is in vain if it is refused."""
    takes: Need | None = None
    """What it takes in amounts. None: that is not known."""
    decides: bool = False
    """Whether these amounts decide about it."""


def are_mistakable(topology: Topology, one: Comer, other: Comer) -> bool:
    """
    Whether a kubelet that asks for GPUs for one of the pods may be answered with those of the other, and that matters: both
    have a container with as many GPUs or slots, or as much computing time or memory of one, and ask for something else with
    it. A kubelet does not name the pod.
    """
    if one.key == other.key:
        return False
    try:
        slots, others_slots = slots_of(topology, one), slots_of(topology, other)
    except InvalidShare:  # its annotations have changed since it was reserved
        return True
    if any(a != b and (a.resource, a.gpus) == (b.resource, b.gpus) for a in slots for b in others_slots):
        return True
    shares, theirs = shares_of(topology, one), shares_of(topology, other)
    if any(a != b and (a.cores == b.cores > 0 or a.blocks == b.blocks > 0) for a in shares for b in theirs):
        return True
    if not any(each.joint is not None for pod in (one, other) for each in pod.demand.containers):
        return False
    gpus, others = ({each.devices.get(GPU, 0) for each in pod.demand.containers} - {0} for pod in (one, other))
    return not gpus.isdisjoint(others)


def shares_of(topology: Topology, pod: Comer) -> set[Share]:
    """What the containers of a pod ask for of GPUs in units."""
    asked = (share_of(topology, each.devices) for each in pod.demand.containers)
    return {share for share in asked if share is not None}


def slots_of(topology: Topology, pod: Comer) -> set[SlotShare]:
    """What the containers of a pod ask for of GPUs in slots."""
    asked = (slots_asked(topology, each.devices, each.about_cards) for each in pod.demand.containers)
    return {share for share in asked if share is not None}


async def all_fit(state: NodeState, pods: Sequence[Comer], turns: Turns) -> bool:
    """
    Whether those of the pods that must fit are admitted, in whatever order all of them come and whatever ends before. A
    decision takes up to a millisecond: the event loop has its turns between them.
    """
    refuses = not POLICIES[pods[0].demand.rules.policy].admits(NO_AFFINITY)
    may_end = bool(state.allocations)  # of all containers that a prediction knows of, also those with CPUs alone
    return await fit_from(state, pods, turns, Steps() if refuses and may_end else None, set())


async def fit_from(
    state: NodeState,
    pods: Sequence[Comer],
    turns: Turns,
    steps: Steps | None,
    ends: set[Ends],
    aligned: tuple[Place, ...] = (),
) -> bool:
    """
    The same from a state of the node on. `steps`: None where nothing can end, or no pod is refused for its alignment.
    `ends`: of the orders that were tried; `aligned`: of the pods that have come.
    """
    tried = set()
    for place, pod in enumerate(pods):
        if pod.key in tried:
            continue
        tried.add(pod.key)
        await turns.give()
        decision, after, places = decide(state, pod.demand), state, aligned
        if isinstance(decision, Admission):
            places = (*aligned, *places_of(pod, decision))
            for each in decision.allocations:
                after = after.holding(each)
        elif pod.must_fit:
            return False
        rest = (*pods[:place], *pods[place + 1 :])
        if not rest:
            ends.add(frozenset(Counter(places).items()))
            if len(ends) > 1:
                return False
            continue
        if steps is not None:
            others = [Waiting(each.key, each.must_fit, each.takes, each.decides) for each in rest]
            free = free_of(state, pod.demand.rules)
            waiting = Waiting(pod.key, pod.must_fit, pod.takes, pod.decides)
            for left in left_elsewhere(waiting, free):
                await turns.give()
                if not fit_whatever_ends(left, others, steps):
                    return False
        if not await fit_from(after, rest, turns, steps, ends, places):
            return False
    return True


def places_of(pod: Comer, admission: Admission) -> tuple[Place, ...]:
    """Where a pod is aligned that must have the slots that are reserved for it; empty for others."""
    if not has_its_own(pod.demand.request, admission.allocations):
        return ()
    return ((pod.key, tuple(each.affinity for each in admission.allocations if each.slots)),)
