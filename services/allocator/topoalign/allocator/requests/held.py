"""What a pod holds already, and whether it asks for just that again: then it gets the same answer."""

from collections.abc import Sequence

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.units import share_of
from topoalign.core.hints.joint_devices import decided_together, is_held
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import CPU
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState


def holds(held: Sequence[Allocation], demand: PodDemand, state: NodeState) -> bool:
    """
    Whether these allocations are what the pod asks for: one for each container, with as many of each device, CPU and byte.
    Of NICs that are decided together there may be more (`core.deviceshare.nearest`).
    """
    asked = {container.container: container for container in demand.containers}
    if asked.keys() != {allocation.owner.container for allocation in held if allocation.owner is not None}:
        return False  # a part of it may have been given back
    for allocation in held:
        container = asked.get(allocation.owner.container) if allocation.owner is not None else None
        if container is None:
            return False
        together = decided_together(state, container) if demand.together else frozenset()
        if together and not is_held(state, container, allocation):
            return False
        share = share_of(state.hardware, container.devices, container.cards)
        if share is not None and len(allocation.amounts) != share.gpus:
            return False
        devices = {name: n for name, n in container.devices.items() if n and name not in together}
        sizes = {block.resource: 0 for block in allocation.memory}
        for block in allocation.memory:
            sizes[block.resource] += block.size
        if (
            {name: len(ids) for name, ids in allocation.from_kubelet.items() if name not in together} != devices
            or (allocation.virtual_functions and not (together or allocation.companions))
            or (allocation.cpus and len(parse_cpuset(allocation.cpus)) * 1000 != container.asked.get(CPU))
            or not all(is_size(allocation, size, container.asked.get(name, 0)) for name, size in sizes.items())
        ):
            return False
    return True


def is_size(allocation: Allocation, size: int, asked: int) -> bool:
    """
    Whether an allocation holds as many bytes of memory as were `asked` for. An init container may hold fewer: later
    containers of the pod take what they reuse of its memory out of its record.
    """
    return size <= asked if allocation.role == "init" else size == asked
