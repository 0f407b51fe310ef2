"""
The device manager's record in the fake kubelet: the devices of each container, and its checkpoint.

It drops devices of pods that are gone from memory when it is asked for hints, when it allocates for a container with
device resources, and when PodResources is listed. The checkpoint is written after an allocation of devices and when a
plugin sends a list, and at no other time: until then it shows the former holders. Devices of a pod that another manager
refused afterwards stay as well.

Source: kubelet v1.36.3, cm/devicemanager (`UpdateAllocatedDevices`, `allocateContainerResources`, `writeCheckpoint`).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import device_checkpoint
from topoalign.kubelet.files.device_checkpoint import NO_NODE, CheckpointData, PodDevicesEntry
from topoalign.kubelet.grpc.api import v1beta1

Part = tuple[ContainerName, ResourceName]
Response = v1beta1.ContainerAllocateResponse


class DeviceManager:
    """Loaded from its checkpoint when the kubelet starts."""

    def __init__(
        self, directory: Path, machine: Callable[[], Topology], healthy: Callable[[], Mapping[str, list[str]]]
    ) -> None:
        """`machine`, `healthy`: what plugins have listed by now. Raises StateFault for a checkpoint that is damaged."""
        self.held: dict[str, dict[Part, tuple[DeviceID, ...]]] = {}
        """Pod UID -> container, resource -> devices, in the order in which they were given out."""
        self.responses: dict[str, dict[Part, Response]] = {}
        """What the plugins said that the container runtime should do."""
        self._directory = directory
        self._machine = machine
        self._healthy = healthy
        known = device_checkpoint.load_devices(directory) or CheckpointData()
        self.registered = tuple(known.registered_devices)
        for entry in known.pod_device_entries or ():
            part = ContainerName(entry.container_name), ResourceName(entry.resource_name)
            ids = dict.fromkeys(DeviceID(device) for devices in entry.device_ids.values() for device in devices)
            self.held.setdefault(entry.pod_uid, {})[part] = tuple(ids)
            self.responses.setdefault(entry.pod_uid, {})[part] = Response.FromString(entry.alloc_resp)

    def drop(self, active: frozenset[str] | None) -> None:
        """Drops, in memory, what pods have that are not active. None: which are is not known yet, so none is dropped."""
        for uid in [uid for uid in self.held if active is not None and uid not in active]:
            del self.held[uid]
            self.responses.pop(uid, None)

    def give(self, uid: str, part: Part, devices: tuple[DeviceID, ...], response: Response) -> None:
        """In memory only: the checkpoint follows when the container has the devices of all its resources."""
        self.held.setdefault(uid, {})[part] = devices
        self.responses.setdefault(uid, {})[part] = response

    def write(self) -> None:
        """Writes the checkpoint: what is held, and which devices are healthy."""
        entries = list(self._entries())
        data = CheckpointData(pod_device_entries=entries or None, registered_devices=dict(self._healthy()))
        device_checkpoint.store(self._directory, data)

    def _entries(self) -> Iterator[PodDevicesEntry]:
        near = self._machine().devices
        for uid, parts in self.held.items():
            for (container, resource), devices in parts.items():
                by_node: dict[int, list[str]] = {}
                for device in devices:
                    for node in near.get(resource, NO_DEVICES).get(device) or (NO_NODE,):
                        by_node.setdefault(node, []).append(device)
                yield PodDevicesEntry(
                    pod_uid=uid,
                    container_name=container,
                    resource_name=resource,
                    device_ids=by_node,
                    alloc_resp=bytes(self.responses[uid][container, resource]),
                )
