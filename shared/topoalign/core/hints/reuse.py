"""
What a container may take over from earlier containers of its own pod.

Plain init containers have ended when the next container starts, so what they held is free for it; what a sidecar or an
app container took is not (kubelet v1.36.3, reuse in a pod). All of it is read off the pod's own allocations in the order
in which they were decided, so that a question about hints carries it without a word more.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from topoalign.core.model.events import Allocation, Owner
from topoalign.core.model.hints import HintQuestion
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.bitmask import Mask, mask_of
from topoalign.core.state.fold import NodeState

T = TypeVar("T")

ReusableMemory = Mapping[tuple[Mask, ResourceName], int]
"""(exact group of NUMA nodes, resource) -> bytes."""


def allocations_of(state: NodeState, pod: PodRequest, container: ContainerName | None = None) -> tuple[Allocation, ...]:
    """The live allocations of a pod, or of one of its containers, oldest first."""
    return tuple(
        held
        for held in state.allocations.values()
        if held.owner is not None
        and (held.owner.pod, held.owner.namespace) == (pod.name, pod.namespace)
        and container in (None, held.owner.container)
    )


def held_by(
    pod: PodRequest,
    container: ContainerRequest,
    devices: dict[ResourceName, tuple[DeviceID, ...]],
    functions: dict[DeviceID, tuple[str, ...]],
) -> Allocation:
    """An allocation of these devices, of some only functions, for a container of a pod that is being decided."""
    owner = Owner(namespace=pod.namespace, pod=pod.name, container=container.name)
    init = container in pod.init_containers
    return Allocation(
        id=AllocationID(f"{owner.namespace}/{owner.pod}/{owner.container}"),
        owner=owner,
        role="sidecar" if container.sidecar else "init" if init else "app",
        devices=devices,
        virtual_functions=functions,
    )


def reusable_devices(held: Iterable[Allocation], resource: ResourceName) -> frozenset[DeviceID]:
    """Those that were held whole. Whoever takes but a function of a NIC takes the NIC out."""
    return left_over(
        (plain, (each.whole_ids if plain else each.device_ids) & {*each.devices.get(resource, ())})
        for each in held
        for plain in [each.role == "init"]
    )


def reusable_functions(held: Iterable[Allocation]) -> frozenset[str]:
    """PCI addresses of virtual functions."""
    return left_over((each.role == "init", each.function_addresses) for each in held)


def reusable_cpus(held: Iterable[Allocation]) -> frozenset[int]:
    return left_over((each.role == "init", each.cpu_ids) for each in held)


def left_over(steps: Iterable[tuple[bool, frozenset[T]]]) -> frozenset[T]:
    """Plain init containers leave what they held, every other container takes its own out."""
    left: frozenset[T] = frozenset()
    for leaves, own in steps:
        left = left | own if leaves else left - own
    return left


def reusable_memory(held: Iterable[Allocation]) -> ReusableMemory:
    """
    What the plain init containers still account for.

    A container that reuses memory takes it into its own blocks and out of theirs (`placement.memory.holding`), so the sum
    of what is left in theirs is what the kubelet remembers as reusable.
    """
    left: dict[tuple[Mask, ResourceName], int] = {}
    for each in held:
        for block in each.memory if each.role == "init" else ():
            group = (mask_of(block.nodes), block.resource)
            left[group] = left.get(group, 0) + block.size
    return left


def held_before(question: HintQuestion) -> list[Allocation]:
    """What containers of the pod hold already, which may restrict the others to some NUMA nodes."""
    pod = (question.pod.name, question.pod.namespace)
    return [
        held
        for held in question.allocations
        if held.owner is not None and (held.owner.pod, held.owner.namespace) == pod
    ]
