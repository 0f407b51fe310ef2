"""
Finds the resources that a container may reuse from earlier containers of its pod.

Plain init containers have ended when the next container starts, so it may reuse their resources, but not those of a sidecar
or an app container (kubelet v1.36.3, reuse in a pod). This follows from the pod's allocations in the order of the decisions,
so a question about hints needs no further field.
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
    """What the pod of this demand holds already: what earlier containers got, oldest first."""
    return live_allocations_of_pod(state, demand.namespace, demand.pod)


def own_part(held: Iterable[Allocation], demand: Demand) -> tuple[Allocation, ...]:
    """Of what a pod holds what is for this very demand: of the container, or all of it for the pod as a whole."""
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
    """An allocation of these devices, of some only functions, for a container of a pod in decision."""
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
    """Those that were held whole. `co_allocated`: also what came with others, of which a kubelet knows nothing."""
    # whoever takes but a function of a NIC takes the NIC out
    return _remaining_after_steps(
        (plain, (each.whole_ids if plain else each.device_ids) & {*devices.get(resource, ())})
        for each in held
        for devices in [each.devices if co_allocated else each.from_kubelet]
        for plain in [each.role == "init"]
    )


def reusable_functions(held: Iterable[Allocation]) -> frozenset[str]:
    """PCI addresses of virtual functions."""
    return _remaining_after_steps((each.role == "init", each.function_addresses) for each in held)


def reusable_cpus(held: Iterable[Allocation]) -> frozenset[int]:
    """CPUs that init containers left."""
    return _remaining_after_steps((each.role == "init", each.cpu_ids) for each in held)


def _remaining_after_steps(steps: Iterable[tuple[bool, frozenset[T]]]) -> frozenset[T]:
    """Plain init containers leave what they held, every other container takes its own out."""
    left: frozenset[T] = frozenset()
    for leaves, own in steps:
        left = left | own if leaves else left - own
    return left


def reusable_memory(held: Iterable[Allocation]) -> ReusableMemory:
    """What the plain init containers still account for, by group of NUMA nodes."""
    # a container that reuses memory takes it into its own blocks and out of theirs (`memory_blocks.hold_allocation`)
    left: dict[tuple[Mask, ResourceName], int] = {}
    for each in held:
        for block in each.memory if each.role == "init" else ():
            group = (node_mask(block.nodes), block.resource)
            left[group] = left.get(group, 0) + block.size
    return left
