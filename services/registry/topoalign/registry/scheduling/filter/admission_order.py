"""
Checks whether a kubelet would admit the pending pods of a node in every order.

A kubelet admits pods in the order in which it receives them. This order can differ from the order of their binds. So
while a node has pods that it has not reported yet, another pod is bound only if the kubelet would admit all of them in
every order. Example: A then B fits. B then A does not fit, because B, if admitted first, takes CPUs of two NUMA nodes.
Also, after a pod ends, the kubelet can align a pending pod to NUMA nodes that another one needs (`realignment`).

An Allocate call does not name the pod. Pods of the same class are interchangeable. Two pending pods are ambiguous
(`are_ambiguous`) and are not bound at the same time in these cases:

- Both request the same number of GPUs, and at least one has annotations that select devices.
- Both request vcuda units, with the same computing time or the same memory, but not with the same request.
- Both request the same number of vGPU slots, with different amounts or different annotations.

A pod that can use only its reserved slots or units must also be aligned to the same NUMA nodes in every order.
Otherwise the node refuses it. Example: A requests 4 CPUs. B requests 4 CPUs, and its annotation allows GPU-0 or GPU-2.
B is bound after A, and GPU-2 is reserved for B. Both pods fit in both orders. But if B is admitted first, the kubelet
aligns it to the NUMA node of GPU-0.
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
    PendingPod,
    containers_fit,
    fit_as_counted,
    fit_whatever_ends,
    have_ample_memory,
    iterate_realigning_ends,
    left_elsewhere,
)
from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.shares import Share, gpus_of_numa_nodes, units_asked
from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU
from topoalign.core.model.topology.bitmask import several
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.state.fold import NodeState
from topoalign.runtime.request_turns import TaskTurns

MOST_ORDERS = 24
"""Maximum number of orders to try. The 24 orders of four pods of different classes require 64 decisions."""
MOST_PODS = 16
"""Maximum number of pods in an order. While orders are tried, other binds to the node wait."""


Place = tuple[object, tuple[tuple[int, ...] | None, ...]]
"""The class of a pod, and the NUMA nodes to which each of its shares is aligned; None: the policy does not align it."""
Ends = frozenset[tuple[Place, int]]
"""The result of one order: place -> number of pods that need their reservation and are aligned there."""


def are_ambiguous(topology: Topology, one: PendingPod, other: PendingPod) -> bool:
    """
    Whether an Allocate call for one pod could receive the reservation of the other pod, and the result would differ.
    This is the case if both have a container with the same number of GPUs or slots, or with the same computing time or
    memory, and the rest of their requests differs.
    """
    if one.key == other.key:
        return False
    slots = requested_slots(topology, one)
    others_slots = requested_slots(topology, other)
    if any(a != b and (a.resource, a.gpus) == (b.resource, b.gpus) for a in slots for b in others_slots):
        return True
    units = requested_units(topology, one)
    theirs = requested_units(topology, other)
    if any(a != b and (a[0].cores == b[0].cores > 0 or a[0].memory == b[0].memory > 0) for a in units for b in theirs):
        return True
    if not any(each.joint is not None for pod in (one, other) for each in pod.demand.containers):
        return False
    gpus, others = ({each.devices.get(GPU, 0) for each in pod.demand.containers} - {0} for pod in (one, other))
    return not gpus.isdisjoint(others)


def requested_units(topology: Topology, pod: PendingPod) -> set[tuple[Amount, int]]:
    """The vcuda units that each container of a pod requests, with its number of GPUs."""
    asked = ((units_asked(topology, each.devices), each.gpus) for each in pod.demand.containers)
    return {(units, gpus) for units, gpus in asked if units is not None}


def requested_slots(topology: Topology, pod: PendingPod) -> set[Share]:
    """The vGPU slots that the containers of a pod request."""
    asked = (each.share(topology) for each in pod.demand.containers)
    return {share for share in asked if share is not None and share.resource is not None}


def are_too_many(pods: Sequence[PendingPod]) -> bool:
    """Whether there are too many pods or too many orders to try. The order within a class does not matter."""
    if len(pods) > MOST_PODS:
        return True
    alike = Counter(each.key for each in pods)
    return factorial(len(pods)) // prod(map(factorial, alike.values())) > MOST_ORDERS


class Later(NamedTuple):
    """Pods that are planned with their gangs. They are admitted in a fixed order, after all others."""

    pods: Sequence[PendingPod] = ()
    guarded: Sequence[PendingPod] = ()
    """Those that must also fit if another pod is aligned to other NUMA nodes because a pod has ended."""


NOBODY_LATER = Later()


async def all_fit(state: NodeState, pods: Sequence[PendingPod], turns: TaskTurns, later: Later = NOBODY_LATER) -> bool:
    """
    Whether the kubelet admits all `must_fit` pods in every order of `pods`, and after them the `later` pods, whichever
    other pods end first. Yields to the event loop between decisions, because a decision takes up to a millisecond.
    """
    if state.allocations:  # includes containers that have only CPUs, because each can end
        judged = list[PendingPod]()
        for place, pod in enumerate(pods):
            await turns.give()
            if pod.must_fit and pod.may_wait:
                others = [each.demand for each in (*pods[:place], *pods[place + 1 :])]
                if not finds_gpus(state, pod.demand, others):
                    return False
                if not await finds_co_allocated(state, pod.demand, pod.takes, turns):
                    return False
            judged.append(decided_by_amounts(state.hardware, pod))
        if is_refused_for_memory(state, judged):
            return False
        pods = judged
    # The order does not matter if amounts alone decide and the policy refuses no pod for its alignment.
    admits_unaligned = POLICIES[pods[0].demand.rules.policy].admits(NO_AFFINITY)
    if admits_unaligned and all(each.decides and each.must_fit for each in pods):
        return fit_in_turn(state, (*pods, *later.pods))
    return await fit_from(state, pods, turns, AlignmentBudget() if may_realign(state, pods[0]) else None, set(), later)


def fit_as_equals(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """Whether the pods belong to one class and are admitted in every order, whichever other pods end."""
    takes = pods[0].takes
    # `fit_as_counted` is valid only for pods that a kubelet aligns to a single NUMA node.
    if takes is None or takes.rest is not None or not takes.strict or any(map(several, takes.preferred)):
        return False
    if not all(each.decides and each.must_fit and each.key == pods[0].key for each in pods):
        return False
    return fit_as_counted(count_free(state, pods[0].demand.rules), pods)


async def finds_co_allocated(state: NodeState, pod: PodDemand, takes: PodNeed | None, turns: TaskTurns) -> bool:
    """Whether a pod with device annotations is also admitted after any single other pod has ended."""
    is_joint = any(each.joint is not None for each in pod.containers)
    if takes is None or not is_joint or not POLICIES[pod.rules.policy].asks:
        return True
    # A kubelet does not read annotations. It can align the pod to NUMA nodes without both a free GPU and a free NIC.
    for remaining in iterate_realigning_ends(state, pod.rules, takes):
        await turns.give()
        if not isinstance(decide_demand(remaining, pod), Admission):
            return False
    return True


def decided_by_amounts(topology: Topology, pod: PendingPod) -> PendingPod:
    """
    Returns the pod. If it requests units or slots, sets `decides` from its other amounts: its units and slots are known
    here to fit on every NUMA node.
    """
    in_parts = any(topology.kind_of(name) in ("unit", "slot") for name in pod.demand.devices)
    is_joint = any(each.joint is not None for each in pod.demand.containers)
    if not in_parts or is_joint or pod.takes is None or not pod.must_fit:
        return pod
    return pod._replace(decides=pod.takes.complete)


def is_refused_for_memory(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """Whether the Memory Manager could refuse a pod that the Topology Manager policy admits, after other pods end."""
    rules = pods[0].demand.rules
    kinds = {name for pod in pods for name in pod.demand.memory}
    policy = POLICIES[rules.policy]
    if rules.memory_manager != "Static" or not policy.admits(NO_AFFINITY):
        return False
    if len(pods) < 2 or len(kinds) < (1 if policy.asks else 2):
        return False
    free = count_free(state, rules)
    if have_ample_memory(free, pods):
        return False
    have_preferred_sets = all(each.takes is not None and each.takes.strict for each in pods)
    return not (have_preferred_sets and fit_whatever_ends(free, pods, AlignmentBudget()))


def may_realign(state: NodeState, pod: PendingPod) -> bool:
    """Whether a container on the node can end, and the policy can refuse pods because of their alignment."""
    may_end = bool(state.allocations)  # includes containers that have only CPUs
    return may_end and not POLICIES[pod.demand.rules.policy].admits(NO_AFFINITY)


def keeps_containers_together(state: NodeState, pod: PodDemand, takes: PodNeed | None) -> bool:
    """Whether a pod that the node admits still fits, whichever pods end. Also True if amounts alone do not decide."""
    if takes is None or takes.rest is None or not state.allocations or POLICIES[pod.rules.policy].admits(NO_AFFINITY):
        return True
    emptied = msgspec.structs.replace(state, allocations={}, memory={})
    return containers_fit(takes, count_free(state, pod.rules), count_free(emptied, pod.rules))


def fits_before_all(state: NodeState, pod: PendingPod, later: Later) -> bool:
    """
    Same as `all_fit`, for a single pod that is admitted before the `later` pods. The caller has already checked that
    the pod fits on the node with their reservations.
    """
    pods = (pod, *later.pods)
    # If amounts alone decide and no pod is refused for its alignment, the order of the pods does not matter.
    if all(each.decides for each in pods) and POLICIES[pod.demand.rules.policy].admits(NO_AFFINITY):
        return True
    free = count_free(state, pod.demand.rules)
    if not fit_as_counted(free, pods) and not fit_in_turn(state, pods):
        return False
    if not later.guarded or not may_realign(state, pod):
        return True
    steps = AlignmentBudget()
    elsewhere = left_elsewhere(pod, free)
    return all(fit_whatever_ends(remaining, (), steps, later.guarded) for remaining in elsewhere)


def fit_in_turn(state: NodeState, pods: Sequence[PendingPod]) -> bool:
    """Whether the pods are admitted in this order."""
    for pod in pods:
        decision = decide_demand(state, pod.demand)
        if not isinstance(decision, Admission):
            return False
        for each in decision.allocations:
            state = state.holding(each)
    return True


async def fit_from(  # noqa: C901  # one search over orders
    state: NodeState,
    pods: Sequence[PendingPod],
    turns: TaskTurns,
    steps: AlignmentBudget | None,
    ends: set[Ends],
    later: Later,
    aligned: tuple[Place, ...] = (),
) -> bool:
    """
    Whether the pods are admitted in every order, starting from this state. `steps`: None if no container can end, or
    the policy refuses no pod because of its alignment. `ends`: the results of the orders tried so far. `aligned`: the
    places of the pods admitted so far in this order.
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
            places = (*aligned, *aligned_places(state.hardware, pod, decision))
            for each in decision.allocations:
                after = after.holding(each)
        elif pod.must_fit:
            return False
        if pod.must_fit and pod.may_wait and not keeps_containers_together(state, pod.demand, pod.takes):
            return False
        rest = (*pods[:place], *pods[place + 1 :])
        if steps is not None and (rest or later.guarded):
            for remaining in left_elsewhere(pod, count_free(state, pod.demand.rules)):
                await turns.give()
                if not fit_whatever_ends(remaining, rest, steps, later.guarded):
                    return False
        if rest:
            if not await fit_from(after, rest, turns, steps, ends, later, places):
                return False
            continue
        ends.add(frozenset(Counter(places).items()))
        if len(ends) > 1 or not fit_in_turn(after, later.pods):
            return False
    return True


def aligned_places(topology: Topology, pod: PendingPod, admission: Admission) -> tuple[Place, ...]:
    """The alignment of a pod that can use only its reserved slots or units; empty for other pods."""
    if not has_its_own(pod.demand.request, admission.allocations):
        return ()
    # Slots that are listed without NUMA nodes are available to the pod whatever its alignment.
    aligned = bool(gpus_of_numa_nodes(topology))
    own = [each.affinity for each in admission.allocations if (each.slots and aligned) or is_given_as_reserved(each)]
    return ((pod.key, tuple(own)),) if own else ()
