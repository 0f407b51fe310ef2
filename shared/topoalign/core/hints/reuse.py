"""
Finds the resources that a container can reuse from earlier containers of its pod.

Regular init containers have ended when the next container starts, so it can reuse their resources. It cannot reuse
those of a sidecar or an app container (kubelet v1.36.3, reuse in a pod). The reusable resources follow from the order
of the pod's allocations, so a HintQuestion needs no additional field.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from topoalign.core.demand.pod_demand import ContainerDemand, Demand
from topoalign.core.model.events import Allocation, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.state.fold import NodeState

T = TypeVar("T")

ReusableMemory = Mapping[tuple[Mask, ResourceName], int]
"""(exact group of NUMA nodes, resource) -> bytes."""


def live_allocations_of_pod(state: NodeState, namespace: Namespace, pod: PodName) -> tuple[Allocation, ...]:
    """The live allocations of a pod, oldest first."""
    return tuple(
        held
        for held in state.allocations.values()
        if held.owner is not None and (held.owner.pod, held.owner.namespace) == (pod, namespace)
    )


def held_by_pod(state: NodeState, demand: Demand) -> tuple[Allocation, ...]:
    """The live allocations of the pod of this demand: those of its earlier containers, oldest first."""
    return live_allocations_of_pod(state, demand.namespace, demand.pod)


def own_part(held: Iterable[Allocation], demand: Demand) -> tuple[Allocation, ...]:
    """The allocations of a pod that belong to this demand: those of its container, or all for the pod as a whole."""
    return tuple(
        each
        for each in held
        if demand.container is None or (each.owner is not None and each.owner.container == demand.container)
    )


def allocation_for(
    demand: ContainerDemand,
    devices: dict[ResourceName, tuple[DeviceID, ...]],
    functions: dict[DeviceID, tuple[str, ...]],
) -> Allocation:
    """An allocation of these devices, or of only these functions, for a container of a pod that is being decided."""
    owner = Owner(namespace=demand.namespace, pod=demand.pod, container=demand.container)
    return Allocation(
        id=AllocationID(f"{owner.namespace}/{owner.pod}/{owner.container}"),
        owner=owner,
        role=demand.role,
        devices=devices,
        virtual_functions=functions,
    )


def reusable_devices(
    held: Iterable[Allocation], resource: ResourceName, *, co_allocated: bool = False
) -> frozenset[DeviceID]:
    """
    The devices to reuse, of those that were held whole. `co_allocated`: also devices that were allocated with others,
    which the kubelet does not know.
    """
    # a container that takes only a function of a NIC makes the NIC not reusable
    return _remaining_after_steps(
        (plain, (each.whole_ids if plain else each.device_ids) & {*devices.get(resource, ())})
        for each in held
        for devices in [each.devices if co_allocated else each.from_kubelet]
        for plain in [each.role == "init"]
    )


def reusable_functions(held: Iterable[Allocation]) -> frozenset[str]:
    """The PCI addresses of the virtual functions to reuse."""
    return _remaining_after_steps((each.role == "init", each.function_addresses) for each in held)


def reusable_cpus(held: Iterable[Allocation]) -> frozenset[int]:
    """The CPUs to reuse from init containers."""
    return _remaining_after_steps((each.role == "init", each.cpu_ids) for each in held)


def _remaining_after_steps(steps: Iterable[tuple[bool, frozenset[T]]]) -> frozenset[T]:
    """The items to reuse: regular init containers add what they held, and other containers remove what they hold."""
    left: frozenset[T] = frozenset()
    for leaves, own in steps:
        left = left | own if leaves else left - own
    return left


def reusable_memory(held: Iterable[Allocation]) -> ReusableMemory:
    """The memory that is still accounted to regular init containers, by group of NUMA nodes."""
    # a container that reuses memory moves it from their blocks to its own (`memory_blocks.hold_allocation`)
    left: dict[tuple[Mask, ResourceName], int] = {}
    for each in held:
        for block in each.memory if each.role == "init" else ():
            group = (node_mask(block.nodes), block.resource)
            left[group] = left.get(group, 0) + block.size
    return left
