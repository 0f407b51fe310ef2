"""Machines whose GPUs are offered in slots, with amounts of cores and memory."""

from collections.abc import Sequence

import msgspec
from decision_support import container
from fact_support import mig_device, owner

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import ContainerRequest
from topoalign.core.model.topology.device_offers import Limiter, Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState

PLAIN = Slots()
WITH_NUMA_NODES = Slots(numa_topology=True)
MIB = 1 << 20
MEMORY, PERCENTAGE = ResourceName("nvidia.com/gpumem"), ResourceName("nvidia.com/gpumem-percentage")
CORES, PRIORITY = ResourceName("nvidia.com/gpucores"), ResourceName("nvidia.com/priority")


def in_slots(topology: Topology, slots: int = 10, gpus: int | None = None, scaling: Slots = PLAIN) -> Topology:
    """
    The machine with its first GPUs, or the MIG instances of those in MIG mode, in so many slots each; the others are not
    offered.
    """
    shared = tuple(base for gpu in topology.gpus[:gpus] for base in ([each.uuid for each in gpu.mig or ()] or [gpu.id]))
    limiter: Limiter | None = None if scaling.instances else "none"
    offer = Offer(resource=GPU, devices=shared, replicas=slots, slots=scaling, limiter=limiter)
    found = msgspec.structs.replace(topology, offers=(offer,))
    validate(found)
    return found


def in_mig_mode(topology: Topology, *memories: Sequence[int]) -> Topology:
    """The machine whose first GPUs have MIG instances `MIG-<index>-<place>` of so many MiB."""
    gpus = [
        msgspec.structs.replace(
            gpu,
            mig=tuple(
                mig_device(f"MIG-{gpu.index}-{place}", place, profile="1g.5gb", memory=memory * MIB)
                for place, memory in enumerate(some)
            ),
        )
        for gpu, some in zip(topology.gpus, memories, strict=False)
    ]
    return msgspec.structs.replace(topology, gpus=(*gpus, *topology.gpus[len(gpus) :]))


def asks(
    gpus: int = 1, memory: int = 0, cores: int = 0, percentage: int = 0, priority: int = 0, name: str = "main"
) -> ContainerRequest:
    """A container that asks for so many GPUs and, where they are not 0, for these amounts of each."""
    amounts = {GPU: gpus, MEMORY: memory, CORES: cores, PERCENTAGE: percentage, PRIORITY: priority}
    return container(name, others={resource: amount for resource, amount in amounts.items() if amount})


def slot(gpu: int, number: int, state: NodeState) -> DeviceID:
    """A slot of the GPU of this index."""
    return DeviceID(f"{state.hardware.gpus[gpu].id}::{number}")


def holding(state: NodeState, *held: tuple[int, int, int] | int) -> NodeState:
    """
    The node with a slot held by a pod each: (GPU's index, cores, MiB), or the index alone where no amount is recorded.
    Slots are numbered from 0 on each GPU.
    """
    taken: dict[int, int] = {}
    for number, each in enumerate(held):
        gpu = each if isinstance(each, int) else each[0]
        device = slot(gpu, taken.setdefault(gpu, 0), state)
        taken[gpu] += 1
        amounts = {} if isinstance(each, int) else {device: Amount(cores=each[1], memory=each[2] * MIB)}
        name = f"held-{number}"
        state = state.holding(
            Allocation(
                id=AllocationID(name),
                owner=owner(name),
                devices={GPU: (device,)},
                slots=amounts,
                pod_uid=f"u{number}",
            )
        )
    return state


def given(state: NodeState, allocation: Allocation) -> dict[int, tuple[int, int]]:
    """Index of each GPU of which an allocation has a slot -> cores and MiB that it holds of it."""
    by_id = state.hardware.gpu_by_id
    return {
        by_id[state.hardware.parent_of(device)].index: (amount.cores, amount.memory // MIB)
        for device, amount in allocation.slots.items()
    }
