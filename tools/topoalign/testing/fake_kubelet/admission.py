"""
An admission as the fake kubelet makes it: each manager records what it gave as soon as it gave it.

The decision is made by `topoalign.core`. Added here are the moment at which the managers drop resources of pods that
are gone, and the order of calls: a plugin's Allocate is called for each resource of a container before anything else of
the pod is decided. So a pod that a later manager refuses leaves its devices in the device manager's record, and its
CPUs in the CPU manager's.

Source: kubelet v1.36.3, cm/topologymanager (scopes) and the managers' `GetTopologyHints`, `GetPodTopologyHints`,
`Allocate`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from topoalign.core.admission.alignment import Aligned
from topoalign.core.admission.pipeline import AdmissionRun, Steps
from topoalign.core.demand.pod_demand import ContainerDemand, Demand, PodDemand
from topoalign.core.deviceshare.node_devices import ContainerDevices
from topoalign.core.hints.reuse import held_by_pod
from topoalign.core.model.decisions import PreferenceQuestion
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.testing.fake_kubelet.cpu_manager import CpuManager
from topoalign.testing.fake_kubelet.device_manager import DeviceManager
from topoalign.testing.fake_kubelet.memory_manager import MemoryManager

MAP_SLOTS = 8
"""Of a Go map with up to so many keys."""


@dataclass(frozen=True)
class Managers:
    """What the kubelet's three managers hold. Each has its own record of pods by their UIDs, and its own file."""

    devices: DeviceManager
    cpus: CpuManager
    memory: MemoryManager

    def drop(self, active: frozenset[str] | None) -> None:
        """As each does before it gives hints: what pods have that are not active. None: none is dropped."""
        self.devices.drop(active)
        self.cpus.drop(active)
        self.memory.drop(active)

    def pods(self) -> dict[str, None]:
        """The UIDs of all that hold something, in the order in which they came."""
        return dict.fromkeys((*self.devices.held, *self.cpus.assigned, *self.memory.blocks))


class HandOut(PreferenceQuestion, frozen=True, kw_only=True):
    """Not asked but told: these devices (`available`) go to the container now, and its plugin is to allocate them."""


def in_map_order(container: ContainerDemand, slot: int) -> ContainerDemand:
    """
    The container with its devices in the order in which the kubelet asks for them: that of a Go map. A map of up to eight
    keys has them in eight slots, here in the order of their names, and is read from a random `slot` on, round about. So of
    two resources the second comes first in one of eight admissions.

    Source: kubelet v1.36.3, devicemanager `allocateContainerResources`; Go 1.24, internal/runtime/maps.
    """
    names = [*container.devices]
    ordered = {name: container.devices[name] for name in (*names[slot:], *names[:slot])}
    return msgspec.structs.replace(container, devices=ordered)


class Admitting(AdmissionRun):
    """A decision that the managers take part in as it is made."""

    def __init__(
        self,
        state: NodeState,
        demand: PodDemand,
        uid: str,
        managers: Managers,
        active: frozenset[str] | None,
        chance: Random | None,
    ) -> None:
        """`state`: what the managers hold without the pods that are not `active`. `chance`: as for the kubelet."""
        super().__init__(state, demand)
        self._uid = uid
        self._managers = managers
        self._active = active
        self._chance = chance

    def align(self, demand: Demand) -> Steps[Aligned]:
        """As in the decision; before hints are asked, every manager drops pods that are gone."""
        if POLICIES[self.rules.policy].asks:
            self._managers.drop(self._active)
        return (yield from super().align(demand))

    def devices(self, container: ContainerDemand, aligned: Aligned) -> Steps[ContainerDevices]:
        """As in the decision; the device manager drops pods that are gone first and writes its checkpoint after."""
        if self.state.hardware.devices.keys() & container.devices.keys():
            self._managers.devices.drop(self._active)
        slot = self._chance.randrange(MAP_SLOTS) if self._chance is not None else 0
        got = yield from super().devices(in_map_order(container, slot), aligned)
        if got.devices:
            self._managers.devices.write()
        return got

    def devices_of(
        self,
        resource: ResourceName,
        container: ContainerDemand,
        hint: TopologyHint,
        near: tuple[DeviceID, ...],
    ) -> Steps[tuple[DeviceID, ...]]:
        """As in the decision; then Allocate of the plugin is called and the devices are recorded."""
        chosen = yield from super().devices_of(resource, container, hint, near)
        if chosen:
            size = len(chosen)
            yield HandOut(
                resource=resource, available=chosen, must_include=chosen, size=size, container=container.container
            )
        return chosen

    def given(self, told: HandOut, response: v1beta1.ContainerAllocateResponse) -> None:
        """The plugin has allocated them."""
        self._managers.devices.give(self._uid, (told.container, told.resource), tuple(told.available), response)

    def cpus(self, container: ContainerDemand, hint: TopologyHint) -> frozenset[int]:
        """As in the decision; the CPU manager drops pods that are gone first and records the CPUs after."""
        self._managers.cpus.drop(self._active)
        got = super().cpus(container, hint)
        if got:
            self._managers.cpus.assign(self._uid, container.container, got)
        self._managers.memory.drop(self._active)  # it is asked next
        return got

    def allocate(self, container: ContainerDemand, aligned: Aligned) -> Steps[None]:
        """As in the decision; then the memory manager records the container's memory."""
        yield from super().allocate(container, aligned)
        self._managers.memory.give(self._uid, held_by_pod(self.state, self.demand), self.state.memory)


def started(root: Path, devices: DeviceManager, machine: Topology, rules: AdmissionRules) -> Managers:
    """The managers of a kubelet that starts. Raises StateFault for a file that cannot be used."""
    return Managers(devices, CpuManager(root, machine, rules), MemoryManager(root, machine, rules))


def unannotated(pod: PodRequest) -> PodRequest:
    """The pod as a kubelet sees it, which reads no annotations about devices."""
    return msgspec.structs.replace(pod, annotations={})
