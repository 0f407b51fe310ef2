"""Removes pods from a node's state, for example terminated pods and pods that would be preempted."""

from collections.abc import Collection

import msgspec

from topoalign.core.model.events import Allocation, MemoryUse
from topoalign.core.model.ids import AllocationID
from topoalign.core.state.fold import NodeState
from topoalign.core.state.memory_account import given_back
from topoalign.core.state.reserved_parts import PodNames


def without_pods(state: NodeState, uids: Collection[str], names: Collection[PodNames]) -> NodeState:
    """
    The state without the resources of these pods. `names`: namespaces and names of the pods, as far as known. They
    count if the node does not know a pod's UID.
    """
    for allocation in tuple(state.allocations.values()):
        if _belongs_to_pods(allocation, uids, names):
            state = state.without(allocation.id)
    usage = state.usage
    if usage is None:
        return state
    kubelet = usage.kubelet
    if kubelet is not None:
        memory: dict[int, MemoryUse] = dict(kubelet.memory)
        for entry in kubelet.entries:
            if entry.pod_uid in uids:
                memory = given_back(memory, Allocation(id=AllocationID(""), memory=entry.memory, lowest_first=True))
        entries = tuple(each for each in kubelet.entries if each.pod_uid not in uids)
        kubelet = msgspec.structs.replace(kubelet, entries=entries, memory=memory)
    containers = tuple(each for each in usage.containers if (each.owner.namespace, each.owner.pod) not in names)
    return msgspec.structs.replace(state, usage=msgspec.structs.replace(usage, containers=containers, kubelet=kubelet))


def has_anything_of(state: NodeState, uid: str, names: Collection[PodNames]) -> bool:
    """
    Whether this pod has devices, CPUs or memory according to the facts. `names`: its namespace and name, which count if
    the node does not know its UID.
    """
    if any(_belongs_to_pods(each, (uid,), names) for each in state.allocations.values()):
        return True
    kubelet = state.usage.kubelet if state.usage is not None else None
    return kubelet is not None and any(each.pod_uid == uid for each in kubelet.entries)


def _belongs_to_pods(allocation: Allocation, uids: Collection[str], names: Collection[PodNames]) -> bool:
    owner = allocation.owner
    if allocation.pod_uid in uids:
        return True
    return not allocation.pod_uid and owner is not None and (owner.namespace, owner.pod) in names
