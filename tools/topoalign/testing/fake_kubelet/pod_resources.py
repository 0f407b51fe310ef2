"""
The kubelet's PodResources API: the holders of all devices, CPUs and memory of the node.

Devices are listed one by one, each with its NUMA nodes; a device without nodes is listed without a topology. Pods have
names here and no UIDs. Init containers that end are not listed, only those that stay (sidecars).

Source: kubelet v1.36.3, apis/podresources.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import cast

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.hints.reuse import live_allocations_of_pod
from topoalign.core.model.errors import quoted
from topoalign.core.model.events import Allocation, MemoryBlock
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.transport import Servicer
from topoalign.testing.fake_kubelet.pods import Running


def nothing() -> None:
    """The default for a callback: do nothing."""


class PodResources(Servicer, v1.PodResourcesListerBase):
    """Answers from the state and the pods as they are at the call."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        pods: Callable[[], Iterable[Running]],
        rules: AdmissionRules,
        listed: Callable[[], None] = nothing,
    ) -> None:
        """`listed` is called before all pods are listed."""
        self._state = state
        self._pods = pods
        self._rules = rules
        self._listed = listed

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:
        """Answer List: all active pods with what their containers hold."""
        self._listed()
        state = self._state()
        return v1.ListPodResourcesResponse(pod_resources=[pod_resources(running, state) for running in self._pods()])

    async def get(self, message: v1.GetPodResourcesRequest) -> v1.GetPodResourcesResponse:
        """Answer Get: one pod. Raises GRPCError if it does not exist."""
        for running in self._pods():
            if (running.pod.namespace, running.pod.name) == (message.pod_namespace, message.pod_name):
                return v1.GetPodResourcesResponse(pod_resources=pod_resources(running, self._state()))
        raise GRPCError(Status.UNKNOWN, f"pod {quoted([message.pod_name])} in namespace not found")

    async def get_allocatable_resources(
        self, message: v1.AllocatableResourcesRequest
    ) -> v1.AllocatableResourcesResponse:
        """Answer GetAllocatableResources: healthy devices, CPUs that are not reserved, and memory."""
        state = self._state()
        reserved = read_reserved_cpus(state.hardware, self._rules)
        return v1.AllocatableResourcesResponse(
            devices=[
                part
                for resource in state.hardware.devices
                for part in container_devices(resource, state.healthy(resource), state)
            ],
            cpu_ids=[cpu.id for cpu in state.hardware.cpus if cpu.id not in reserved],
            memory=[
                v1.ContainerMemory(memory_type="memory", size=node.memory, topology=topology((node.id,)))
                for node in state.hardware.nodes
                if node.memory is not None
            ],
        )


def pod_resources(running: Running, state: NodeState) -> v1.PodResources:
    """What the managers hold for it: after a checkpoint was lost, that is less than it uses."""
    all_held = live_allocations_of_pod(state, running.pod.namespace, running.pod.name)
    held = {a.owner.container: a for a in all_held if a.owner is not None}
    return v1.PodResources(
        name=running.pod.name,
        namespace=running.pod.namespace,
        containers=[
            container_resources(container.name, held.get(container.name), state)
            for container in (*(each for each in running.pod.init_containers if each.sidecar), *running.pod.containers)
        ],
    )


def container_resources(name: str, held: Allocation | None, state: NodeState) -> v1.ContainerResources:
    """The message about one container. None: it holds nothing."""
    if held is None:
        return v1.ContainerResources(name=name)
    return v1.ContainerResources(
        name=name,
        devices=[part for resource, ids in held.devices.items() for part in container_devices(resource, ids, state)],
        cpu_ids=sorted(parse_cpuset(held.cpus)),
        memory=[memory(block) for block in held.memory],
    )


def container_devices(
    resource: ResourceName, ids: Iterable[DeviceID], state: NodeState
) -> Iterator[v1.ContainerDevices]:
    """One message per device, as a kubelet sends it, with its NUMA nodes if it has any."""
    known = state.hardware.devices.get(resource, NO_DEVICES)
    for device in ids:
        yield device_message(resource, device, tuple(known.get(device) or ()))


@lru_cache(20_000)
def device_message(resource: ResourceName, device: DeviceID, nodes: tuple[int, ...]) -> v1.ContainerDevices:
    """
    About one device near these NUMA nodes; () for one without. Encoded: the generated code takes that for a message, and a
    node with shares sends thousands in each list.
    """
    near = topology(nodes) if nodes else None
    encoded = bytes(v1.ContainerDevices(resource_name=resource, device_ids=[device], topology=near))
    return cast(v1.ContainerDevices, encoded)


def memory(block: MemoryBlock) -> v1.ContainerMemory:
    """The message about one memory block; sizes are in bytes."""
    return v1.ContainerMemory(memory_type=block.resource, size=block.size, topology=topology(block.nodes))


def topology(nodes: Iterable[int]) -> v1.TopologyInfo:
    """The message with these NUMA node ids."""
    return v1.TopologyInfo(nodes=[v1.NumaNode(id=node) for node in nodes])
