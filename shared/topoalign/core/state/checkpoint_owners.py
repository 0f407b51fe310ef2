"""
Finds the owners of allocations that have none, by the kubelet's checkpoint.

PodResources shows no plain init container, so what one leaves when it has ended gets no owner in the record. The checkpoint
has the UID of its pod and its name, and the name of the pod is known by another container of it, or by its reservation.
Example, of a pod with UID u-1 whose init container had two GPUs and whose app container took over one of them:

    record          GPU-0: ml/train/main, pod u-1; GPU-1: no owner
    checkpoint      u-1 fetch: GPU-0, GPU-1; u-1 main: GPU-0
    so GPU-1 is held by ml/train/fetch

This is for people. Nothing is decided by it: an allocation that was never shown with an owner ends in another way.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.reservations import Reservation

Place = tuple[ResourceName, DeviceID]
Container = tuple[str, ContainerName]
"""UID of the pod, and name of the container."""


def with_checkpoint_owners(
    allocations: Sequence[Allocation], entries: Iterable[CheckpointEntry], reservations: Iterable[Reservation]
) -> tuple[Allocation, ...]:
    """
    The allocations, in which those without an owner have one if the checkpoint gives all their devices to one container
    alone, and the name of its pod is known.
    """
    if all(each.owner is not None for each in allocations):
        return tuple(allocations)
    pods = {each.pod_uid: (each.namespace, each.pod) for each in reservations}
    pods |= {each.pod_uid: (each.owner.namespace, each.owner.pod) for each in allocations if each.owner is not None}
    holders = defaultdict[Place, set[Container]](set)
    for entry in entries:
        for resource, devices in entry.devices.items():
            for device in devices:
                holders[resource, device].add((entry.pod_uid, entry.container))

    def owner_of(allocation: Allocation) -> Owner | None:
        places = [(name, device) for name, ids in allocation.from_kubelet.items() for device in ids]
        shared = set.intersection(*(holders.get(place, set()) for place in places)) if places else set()
        if len(shared) != 1:
            return None
        uid, container = shared.pop()
        if not uid or uid not in pods:
            return None
        namespace, pod = pods[uid]
        return Owner(namespace=namespace, pod=pod, container=container)

    return tuple(
        msgspec.structs.replace(each, owner=owner_of(each)) if each.owner is None else each for each in allocations
    )
