"""
The pods that the kubelet stand-in has admitted, and what of them survives in the checkpoint.

There is no API server to give out UIDs, so a pod's UID is its `namespace/name`. The checkpoint knows devices only: CPUs
and memory are in other files of a real kubelet, which the stand-in does without.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from topoalign.allocator.kubelet.api import v1beta1
from topoalign.core.events import Allocation, Owner
from topoalign.core.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.requests import ContainerRequest, PodRequest
from topoalign.core.state import NodeState
from topoalign.kubelet.device_checkpoint import NO_NODE, PodDevicesEntry

PodKey = tuple[Namespace, PodName]


@dataclass(kw_only=True)
class Running:
    """A pod that was admitted."""

    pod: PodRequest
    allocations: tuple[Allocation, ...]
    responses: dict[tuple[ContainerName, ResourceName], v1beta1.ContainerAllocateResponse] = field(default_factory=dict)
    """What the plugin said that the container runtime should do."""

    def parts(self) -> Iterator[tuple[ContainerName, ResourceName, tuple[DeviceID, ...]]]:
        """The devices of each container and resource, in the order in which they are given out."""
        for allocation in self.allocations:
            for resource, devices in allocation.devices.items():
                yield container_of(allocation), resource, devices


def container_of(allocation: Allocation) -> ContainerName:
    """Decisions name the container that each allocation is for."""
    if allocation.owner is None:
        raise ValueError(f"allocation {allocation.id} has no owner")
    return allocation.owner.container


def remembered(running: Running, state: NodeState) -> Iterator[PodDevicesEntry]:
    """What the checkpoint keeps of a pod: that of which a plugin has answered."""
    for container, resource, devices in running.parts():
        response = running.responses.get((container, resource))
        if response is None:
            continue
        by_node: dict[int, list[str]] = {}
        for device in devices:
            for node in state.hardware.devices.get(resource, {}).get(device) or (NO_NODE,):
                by_node.setdefault(node, []).append(device)
        yield PodDevicesEntry(
            pod_uid=f"{running.pod.namespace}/{running.pod.name}",
            container_name=container,
            resource_name=resource,
            device_ids=by_node,
            alloc_resp=bytes(response),
        )


def restored(entries: Iterable[PodDevicesEntry]) -> dict[PodKey, Running]:
    """The pods of a checkpoint, with their devices and nothing else."""
    devices: dict[PodKey, dict[ContainerName, dict[ResourceName, tuple[DeviceID, ...]]]] = {}
    responses: dict[PodKey, dict[tuple[ContainerName, ResourceName], v1beta1.ContainerAllocateResponse]] = {}
    for entry in entries:
        namespace, _, name = entry.pod_uid.partition("/")
        key = Namespace(namespace), PodName(name)
        container, resource = ContainerName(entry.container_name), ResourceName(entry.resource_name)
        ids = dict.fromkeys(DeviceID(device) for devices in entry.device_ids.values() for device in devices)
        devices.setdefault(key, {}).setdefault(container, {})[resource] = tuple(ids)
        response = v1beta1.ContainerAllocateResponse.FromString(entry.alloc_resp)
        responses.setdefault(key, {})[container, resource] = response
    return {key: revived(key, held, responses[key]) for key, held in devices.items()}


def revived(
    key: PodKey,
    held: dict[ContainerName, dict[ResourceName, tuple[DeviceID, ...]]],
    responses: dict[tuple[ContainerName, ResourceName], v1beta1.ContainerAllocateResponse],
) -> Running:
    namespace, name = key
    return Running(
        pod=PodRequest(
            namespace=namespace,
            name=name,
            containers=tuple(
                ContainerRequest(name=container, limits={resource: len(ids) for resource, ids in devices.items()})
                for container, devices in held.items()
            ),
        ),
        allocations=tuple(
            Allocation(
                id=AllocationID(f"{namespace}/{name}/{container}"),
                owner=Owner(namespace=namespace, pod=name, container=container),
                devices=devices,
            )
            for container, devices in held.items()
        ),
        responses=responses,
    )
