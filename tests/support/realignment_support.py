"""Nodes with pods, of which some end while others come: for what is admitted whatever ends."""

from random import Random

from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import AllocationID
from topoalign.core.state.fold import NodeState

Holders = dict[str, list[AllocationID]]
"""Name of a pod -> what it holds."""


def with_pod(state: NodeState, demand: PodDemand) -> tuple[NodeState, list[AllocationID]] | None:
    """The node after it has admitted a pod, and what this holds. None: it refuses the pod."""
    decision = decide_demand(state, demand)
    if not isinstance(decision, Admission):
        return None
    for each in decision.allocations:
        state = state.holding(each)
    return state, [each.id for each in decision.allocations]


def held_by(state: NodeState, pods: list[PodDemand | None], chance: Random) -> tuple[NodeState, Holders]:
    """The node with those of these pods that it admits and that have not ended since."""
    holders: Holders = {}
    for each in pods:
        admitted = with_pod(state, each) if each is not None else None
        if each is not None and admitted is not None:
            state, holders[each.pod] = admitted
    for name in [*holders]:
        if chance.random() < 0.35:
            for each_id in holders.pop(name):
                state = state.without(each_id)
    return state, holders


def refused_after_ends(state: NodeState, pods: list[PodDemand], holders: Holders, chance: Random) -> bool:
    """
    Whether some pod is refused when they come in a random order and some holders end: each one alone, and some random sets
    of them.
    """
    ends = [[name] for name in holders] + [
        chance.sample([*holders], chance.randrange(len(holders) + 1)) for _ in "12345"
    ]
    for ended in ends:
        after, coming = state, chance.sample(pods, len(pods))
        ending = chance.randrange(len(pods))
        for place, each in enumerate(coming):
            for each_id in [each_id for name in ended for each_id in holders[name]] if place == ending else ():
                after = after.without(each_id)
            admitted = with_pod(after, each)
            if admitted is None:
                return True
            after, _ = admitted
    return False
