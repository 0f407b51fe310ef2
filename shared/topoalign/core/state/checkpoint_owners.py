"""
Finds owners in the kubelet's checkpoint for allocations that have none.

PodResources does not report plain init containers, so their allocations have no owner. The checkpoint has the UID of
the pod and the name of the container. The name of the pod is known from another container or from a reservation.
Example: the init container of the pod with UID u-1 had two GPUs, and the app container reuses one of them:

    record          GPU-0: ml/train/main, pod u-1; GPU-1: no owner
    checkpoint      u-1 fetch: GPU-0, GPU-1; u-1 main: GPU-0
    so GPU-1 is held by ml/train/fetch

These owners are only shown to people. No decision uses them, because the end of an allocation that was never reported
with an owner is detected in another way.
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
    The allocations. An allocation without an owner gets one if exactly one container has all its devices in the
    checkpoint, and if the name of the pod is known.
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
