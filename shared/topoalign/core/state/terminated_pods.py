"""Removes from the facts of a node what pods have that have terminated, or that would be preempted."""

from collections.abc import Collection

import msgspec

from topoalign.core.model.events import Allocation, MemoryUse, Owner, UsageObserved
from topoalign.core.model.ids import AllocationID
from topoalign.core.state.fold import NodeState
from topoalign.core.state.memory_account import given_back
from topoalign.core.state.reserved_parts import PodNames


def without_pods(state: NodeState, uids: Collection[str], names: Collection[PodNames]) -> NodeState:
    """
    The facts without what these pods have: their allocations, and what the kubelet's checkpoints and PodResources list.
    `names`: of those of them that are known; they count where the node does not know the UID.
    """
    for allocation in tuple(state.allocations.values()):
        if allocation.pod_uid in uids or (not allocation.pod_uid and belongs_to_pods(allocation.owner, names)):
            state = state.without(allocation.id)
    if state.usage is None:
        return state
    return msgspec.structs.replace(state, usage=without_usage(state.usage, uids, names))


def has_anything_of(state: NodeState, uid: str, names: Collection[PodNames]) -> bool:
    """Whether the facts show this pod with devices, CPUs or memory, by its UID or, where that is not known, its names."""
    if any(
        each.pod_uid == uid or (not each.pod_uid and belongs_to_pods(each.owner, names))
        for each in state.allocations.values()
    ):
        return True
    kubelet = state.usage.kubelet if state.usage is not None else None
    return kubelet is not None and any(each.pod_uid == uid for each in kubelet.entries)


def without_usage(usage: UsageObserved, uids: Collection[str], names: Collection[PodNames]) -> UsageObserved:
    """What the kubelet gave out, without these pods."""
    containers = tuple(each for each in usage.containers if not belongs_to_pods(each.owner, names))
    kubelet = usage.kubelet
    if kubelet is not None:
        memory: dict[int, MemoryUse] = dict(kubelet.memory)
        for entry in kubelet.entries:
            if entry.pod_uid in uids:
                gone = Allocation(id=AllocationID(""), memory=entry.memory, lowest_first=True)
                memory = given_back(memory, gone)
        entries = tuple(each for each in kubelet.entries if each.pod_uid not in uids)
        kubelet = msgspec.structs.replace(kubelet, entries=entries, memory=memory)
    return msgspec.structs.replace(usage, containers=containers, kubelet=kubelet)


def belongs_to_pods(owner: Owner | None, names: Collection[PodNames]) -> bool:
    """Whether a container belongs to one of these pods."""
    return owner is not None and (owner.namespace, owner.pod) in names
