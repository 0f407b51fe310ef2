"""
The pods of the fake kubelet, in place of an API server.

No API server gives out UIDs. A pod without one gets `namespace_name`, with a number appended if there was such a pod
before. Neither name can contain an underscore, so a kubelet that starts on the files of another one knows the names of
its pods.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from topoalign.core.model.events import Allocation, Owner
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.testing.fake_kubelet.device_manager import DeviceManager, Part
from topoalign.testing.fake_kubelet.root_directory import PodDirectories

PodKey = tuple[Namespace, PodName]


@dataclass(kw_only=True)
class Running:
    """A pod that was admitted."""

    uid: str
    pod: PodRequest
    allocations: tuple[Allocation, ...]
    responses: dict[Part, v1beta1.ContainerAllocateResponse] = field(default_factory=dict)
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


class Pods:
    """The pods of a node, and their directories."""

    def __init__(self, root: Path) -> None:
        self.running: dict[PodKey, Running] = {}
        """The active ones."""
        self._directories = PodDirectories(root)
        self._inactive: dict[PodKey, str] = {}
        """Ended or refused, and not deleted -> UID."""
        self._used: set[str] = set()

    def new_uid(self, pod: PodRequest, held: Iterable[str]) -> str:
        """A UID that no pod had, nor any of those for which something is `held`."""
        base = f"{pod.namespace}_{pod.name}"
        taken = self._used.union(held)
        numbered = (f"{base}_{number}" for number in count(2))
        return next(uid for uid in chain((base,), numbered) if uid not in taken)

    def admitted(self, running: Running, volumes: bool) -> None:
        """It runs; `volumes`: it has one at least."""
        self.running[running.pod.namespace, running.pod.name] = running
        self._used.add(running.uid)
        self._directories.make(running.uid, volumes)

    def refused(self, pod: PodRequest, uid: str, volumes: bool, settled: bool) -> None:
        """Only one with a volume that is refused while the kubelet starts gets a directory."""
        self._used.add(uid)
        self._inactive[pod.namespace, pod.name] = uid
        if volumes and not settled:
            self._directories.make(uid, volumes)
            self._directories.tear_down(uid)

    def end(self, key: PodKey) -> None:
        """It has ended, Succeeded or Failed, and is not deleted."""
        self._inactive[key] = uid = self.running.pop(key).uid
        self._directories.tear_down(uid)

    def remove(self, key: PodKey) -> bool:
        """It is deleted. Whether there was such a pod."""
        running = self.running.pop(key, None)
        uid = running.uid if running is not None else self._inactive.pop(key, None)
        if uid is not None:
            self._directories.remove(uid)
        return uid is not None

    def find(self, devices: DeviceManager) -> None:
        """Find the pods that another fake kubelet left running in this root directory, with their devices alone."""
        found = self._directories.active() - self._used
        for uid in sorted(found):
            running = restored(uid, devices.held.get(uid, {}), devices.responses.get(uid, {}))
            if running is not None:
                self.running.setdefault((running.pod.namespace, running.pod.name), running)
                self._used.add(uid)


def restored(
    uid: str,
    held: dict[Part, tuple[DeviceID, ...]],
    responses: dict[Part, v1beta1.ContainerAllocateResponse],
) -> Running | None:
    """A pod of another fake kubelet's checkpoint, with its devices alone. None for one that has no name in it."""
    names = uid.split("_")
    if len(names) < 2:
        return None
    namespace = Namespace(names[0])
    name = PodName(names[1])
    devices: dict[ContainerName, dict[ResourceName, tuple[DeviceID, ...]]] = {}
    for (container, resource), ids in held.items():
        devices.setdefault(container, {})[resource] = ids
    return Running(
        uid=uid,
        pod=PodRequest(
            namespace=namespace,
            name=name,
            containers=tuple(
                ContainerRequest(name=container, limits={resource: len(ids) for resource, ids in of_container.items()})
                for container, of_container in devices.items()
            ),
        ),
        allocations=tuple(
            Allocation(
                id=AllocationID(f"{namespace}/{name}/{container}"),
                owner=Owner(namespace=namespace, pod=name, container=container),
                devices=of_container,
            )
            for container, of_container in devices.items()
        ),
        responses=dict(responses),
    )
