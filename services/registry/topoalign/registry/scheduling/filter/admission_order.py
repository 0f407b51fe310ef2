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

A pod that must have the slots or units that are reserved for it is also to be aligned to the same NUMA nodes in every order:
elsewhere the node refuses it. Example: a pod for GPU-0 or GPU-2 with 4 CPUs comes after one with as many. The two fit in
both orders, but where it comes first it is aligned to the NUMA node of GPU-0, and GPU-2 is reserved for it.
"""

from collections import Counter
from collections.abc import Sequence
from math import factorial, prod
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.feasibility import PodNeed
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.gang_plan import has_its_own, is_given_as_reserved
from topoalign.core.admission.realignment import (
    AlignmentBudget,
    PendingPodAmounts,
    containers_fit,
    fit_as_counted,
    fit_whatever_ends,
    have_ample_memory,
    iterate_realigning_ends,
    left_elsewhere,
)
from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.shares import Share, SlotShare, gpus_of_numa_nodes, share_from_units, slots_asked
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU
from topoalign.core.model.topology.bitmask import several
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.state.fold import NodeState
from topoalign.runtime.request_turns import Turns

MOST_ORDERS = 24
"""Orders that are tried: of four pods of which no two ask for the same, with 64 decisions."""
MOST_PODS = 16
"""Pods in one of them: binds of a node wait for one another while it is tried."""


Place = tuple[object, tuple[tuple[int, ...] | None, ...]]
"""What a pod asks for, and the NUMA nodes to which its parts of GPUs are aligned; None: the policy does not say."""
Ends = frozenset[tuple[Place, int]]
"""How often pods are aligned so that must have what is reserved for them, after one order of all pods."""


class PendingPod(NamedTuple):
    """A pod that a kubelet will admit or refuse."""

    key: object
    """Equal for pods that ask for the same: their order among one another does not matter."""
    demand: PodDemand
    """Under a name that no other one has."""
    must_fit: bool
    """Whether all is in vain if it is refused."""
    takes: PodNeed | None = None
    """What it takes in amounts. None: that is not known."""
    decides: bool = False
    """Whether these amounts decide about it."""
    may_wait: bool = True
    """
    Whether it can wait until no end of another pod may lead its kubelet to refuse it. Not a pod that is planned with its
    gang, and beside which none is pending: what is reserved for it would end, and be planned again for the same place.
    """


def are_mistakable(topology: Topology, one: PendingPod, other: PendingPod) -> bool:
    """
    Whether a kubelet that asks for GPUs for one of the pods may be answered with those of the other, and that matters: both
    have a container with as many GPUs or slots, or as much computing time or memory of one, and ask for something else with
    it. A kubelet does not name the pod.
    """
    if one.key == other.key:
        return False
    try:
        slots = slots_of(topology, one)
        others_slots = slots_of(topology, other)
    except InvalidShare:  # its annotations have changed since it was reserved
        return True
    if any(a != b and (a.resource, a.gpus) == (b.resource, b.gpus) for a in slots for b in others_slots):
        return True
    shares = shares_of(topology, one)
    theirs = shares_of(topology, other)
    if any(a != b and (a.cores == b.cores > 0 or a.blocks == b.blocks > 0) for a in shares for b in theirs):
        return True
    if not any(each.joint is not None for pod in (one, other) for each in pod.demand.containers):
        return False
    gpus, others = ({each.devices.get(GPU, 0) for each in pod.demand.containers} - {0} for pod in (one, other))
    return not gpus.isdisjoint(others)


def shares_of(topology: Topology, pod: PendingPod) -> set[Share]:
    """What the containers of a pod ask for of GPUs in units."""
    asked = (share_from_units(topology, each.devices, each.cards) for each in pod.demand.containers)
    return {share for share in asked if share is not None}


def slots_of(topology: Topology, pod: PendingPod) -> set[SlotShare]:
    """What the containers of a pod ask for of GPUs in slots."""
    asked = (
        slots_asked(topology, one.devices, one.gpu_annotations, as_hami=one.as_hami) for one in pod.demand.containers
    )
    return {share for share in asked if share is not None}


def are_too_many(pods: Sequence[PendingPod]) -> bool:
    """Whether the pods come in more orders than are tried. Pods that ask for the same come in one."""
    if len(pods) > MOST_PODS:
        return True
    alike = Counter(each.key for each in pods)
    return factorial(len(pods)) // prod(map(factorial, alike.values())) > MOST_ORDERS


class Later(NamedTuple):
    """Pods that come one after the other, once all others have: those that are planned with their gangs."""

    pods: Sequence[PendingPod] = ()
    guarded: Sequence[PendingPod] = ()
    """Those of them that are to fit also where another pod is aligned elsewhere because something has ended."""


NOBODY_LATER = Later()


async def all_fit(state: NodeState, pods: Sequence[PendingPod], turns: Turns, later: Later = NOBODY_LATER) -> bool:
    """
    Whether those of the pods that must fit are admitted, in whatever order all of them come and whatever ends before, and
    then those that come later. A decision takes up to a millisecond: the event loop has its turns between them.
    """
    if state.allocations:  # of all containers that a prediction knows of, also those with CPUs alone: they may end
        led = list[PendingPod]()
        for place, pod in enumerate(pods):
            await turns.give()
            others = [each.demand for each in (*pods[:place], *pods[place + 1 :])]
            is_judged = pod.must_fit and pod.may_wait
            if is_judged and not finds_its_gpus(state, pod.demand, others):
                return False
            if is_judged and not await finds_co_allocated(state, pod.demand, pod.takes, turns):
                return False
            led.append(counted_by_numbers(state.hardware, pod))
        if is_refused_for_memory(state, led):
            return False
        pods = led
    if are_judged_by_amounts(pods):
        return fit_in_turn(state, (*pods, *later.pods))
    return await fit_from(state, pods, turns, AlignmentBudget() if may_realign(state, pods[0]) else None, set(), later)


def fit_as_equals(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """
    Whether the pods ask for the same, and are admitted in any order and whatever ends before: amounts decide about them, a
    kubelet aligns each to a single NUMA node, and so many of them fit there. What ends only adds to what is free.
    """
    takes = pods[0].takes
    if takes is None or takes.rest is not None or not takes.strict or any(map(several, takes.preferred)):
        return False
    if not all(each.decides and each.must_fit and each.key == pods[0].key for each in pods):
        return False
    return fit_as_counted(count_free(state, pods[0].demand.rules), [*map(in_amounts, pods)])


def are_judged_by_amounts(pods: Sequence[PendingPod]) -> bool:
    """
    Whether the order of the pods does not matter: amounts decide about each, all of them must fit, and the policy refuses
    none for its alignment.
    """
    if not POLICIES[pods[0].demand.rules.policy].admits(NO_AFFINITY):
        return False
    return all(each.decides and each.must_fit for each in pods)


def finds_its_gpus(state: NodeState, pod: PodDemand, others: Sequence[PodDemand]) -> bool:
    """As `finds_gpus`; False where annotations of one of them have changed since it was reserved, and cannot be meant."""
    try:
        return finds_gpus(state, pod, others)
    except InvalidShare:
        return False


async def finds_co_allocated(state: NodeState, pod: PodDemand, takes: PodNeed | None, turns: Turns) -> bool:
    """
    Whether a pod with annotations about devices is admitted also after the end of any one other pod: a kubelet knows no
    annotations, and may align it to NUMA nodes whose free GPUs have no NIC beside them. `takes`: as of `PendingPod`.
    """
    is_joint = any(each.joint is not None for each in pod.containers)
    if takes is None or not is_joint or not POLICIES[pod.rules.policy].asks:
        return True
    for left in iterate_realigning_ends(state, pod.rules, takes):
        await turns.give()
        if not isinstance(decide_demand(left, pod), Admission):
            return False
    return True


def counted_by_numbers(topology: Topology, pod: PendingPod) -> PendingPod:
    """A pod that finds its GPUs wherever it is led: if these are parts of GPUs, amounts decide about the rest."""
    in_parts = any(topology.kind_of(name) in ("unit", "slot") for name in pod.demand.devices)
    is_joint = any(each.joint is not None for each in pod.demand.containers)
    if not in_parts or is_joint or pod.takes is None or not pod.must_fit:
        return pod
    return pod._replace(decides=pod.takes.complete)


def is_refused_for_memory(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """
    Whether one of the pods may be refused for its memory once others have ended, although its policy admits it without
    alignment: the memory manager refuses it where it is aligned to NUMA nodes with too little. Not where all of them find
    preferred sets with room, or any NUMA node will do. Without a policy memory of one kind comes to the same wherever it is.
    """
    rules = pods[0].demand.rules
    kinds = {name for pod in pods for name in pod.demand.memory}
    policy = POLICIES[rules.policy]
    if rules.memory_manager != "Static" or not policy.admits(NO_AFFINITY):
        return False
    if len(pods) < 2 or len(kinds) < (1 if policy.asks else 2):
        return False
    free = count_free(state, rules)
    known = [in_amounts(each) for each in pods]
    if have_ample_memory(free, known):
        return False
    finds_sets = all(each.takes is not None and each.takes.strict for each in known)
    return not (finds_sets and fit_whatever_ends(free, known, AlignmentBudget()))


def may_realign(state: NodeState, pod: PendingPod) -> bool:
    """Whether something can end on the node, and pods may be refused for their alignment."""
    may_end = bool(state.allocations)  # of all containers that a prediction knows of, also those with CPUs alone
    return may_end and not POLICIES[pod.demand.rules.policy].admits(NO_AFFINITY)


def keeps_containers_together(state: NodeState, pod: PodDemand, takes: PodNeed | None) -> bool:
    """
    Whether a pod that is admitted as the node is gets room for all of its containers whatever ends before. `takes`: as of
    `PendingPod`. True also where amounts do not tell, as of init containers with devices.
    """
    if takes is None or takes.rest is None or not state.allocations or POLICIES[pod.rules.policy].admits(NO_AFFINITY):
        return True
    emptied = msgspec.structs.replace(state, allocations={}, memory={})
    return containers_fit(takes, count_free(state, pod.rules), count_free(emptied, pod.rules))


def leaves_room(state: NodeState, pod: PendingPod, later: Later) -> bool:
    """
    As `all_fit`, for a single pod that comes first. Where amounts decide about all of them and none is refused for its
    alignment, whoever fits beside the others fits before them.
    """
    if all(each.decides for each in (pod, *later.pods)) and POLICIES[pod.demand.rules.policy].admits(NO_AFFINITY):
        return True
    free = count_free(state, pod.demand.rules)
    counted = [in_amounts(each) for each in (pod, *later.pods)]
    if not fit_as_counted(free, counted) and not fit_in_turn(state, (pod, *later.pods)):
        return False
    if not later.guarded or not may_realign(state, pod):
        return True
    steps = AlignmentBudget()
    guarded = [in_amounts(each) for each in later.guarded]
    elsewhere = left_elsewhere(counted[0], free)
    return all(fit_whatever_ends(left, (), steps, guarded) for left in elsewhere)


def fit_in_turn(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """Whether the pods are admitted one after the other."""
    for pod in pods:
        decision = decide_demand(state, pod.demand)
        if not isinstance(decision, Admission):
            return False
        for each in decision.allocations:
            state = state.holding(each)
    return True


def in_amounts(pod: PendingPod) -> PendingPodAmounts:
    """The pod as amounts tell of it."""
    return PendingPodAmounts(pod.key, pod.must_fit, pod.takes, pod.decides)


async def fit_from(  # noqa: C901  # one search over orders
    state: NodeState,
    pods: Sequence[PendingPod],
    turns: Turns,
    steps: AlignmentBudget | None,
    ends: set[Ends],
    later: Later,
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
        decision = decide_demand(state, pod.demand)
        after = state
        places = aligned
        if isinstance(decision, Admission):
            places = (*aligned, *places_of(state.hardware, pod, decision))
            for each in decision.allocations:
                after = after.holding(each)
        elif pod.must_fit:
            return False
        if pod.must_fit and pod.may_wait and not keeps_containers_together(state, pod.demand, pod.takes):
            return False
        rest = (*pods[:place], *pods[place + 1 :])
        if steps is not None and (rest or later.guarded):
            others = [*map(in_amounts, rest)]
            guarded = [*map(in_amounts, later.guarded)]
            for left in left_elsewhere(in_amounts(pod), count_free(state, pod.demand.rules)):
                await turns.give()
                if not fit_whatever_ends(left, others, steps, guarded):
                    return False
        if rest:
            if not await fit_from(after, rest, turns, steps, ends, later, places):
                return False
            continue
        ends.add(frozenset(Counter(places).items()))
        if len(ends) > 1 or not fit_in_turn(after, later.pods):
            return False
    return True


def places_of(topology: Topology, pod: PendingPod, admission: Admission) -> tuple[Place, ...]:
    """
    Where a pod is aligned that must have the slots or units that are reserved for it; empty for others, and where its slots
    are listed without NUMA nodes: the kubelet offers those that are reserved wherever it aligns the pod.
    """
    if not has_its_own(pod.demand.request, admission.allocations):
        return ()
    aligned = bool(gpus_of_numa_nodes(topology))
    own = [each.affinity for each in admission.allocations if (each.slots and aligned) or is_given_as_reserved(each)]
    return ((pod.key, tuple(own)),) if own else ()
