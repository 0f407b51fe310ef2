"""What a pod holds already, and whether it asks for just that again: then it gets the same answer."""

from collections.abc import Sequence

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.deviceshare.node_devices import RESOURCES
from topoalign.core.hints.joint_devices import check_annotations, decided_jointly, is_held
from topoalign.core.hints.requested import device_limits
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import CPU
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState


def held_by(ledger: Ledger, pod: PodRequest) -> list[Allocation]:
    """The live allocations of a pod of this name."""
    return [
        allocation
        for allocation in ledger.state.allocations.values()
        if allocation.owner is not None
        and (allocation.owner.namespace, allocation.owner.pod) == (pod.namespace, pod.name)
    ]


def holds(held: Sequence[Allocation], pod: PodRequest, state: NodeState, rules: AdmissionRules) -> bool:
    """
    Whether these allocations are what the pod asks for: one for each container, with as many of each device, CPU and byte.
    Of NICs that are decided jointly there may be more (`core.deviceshare.nearest`). Raises InvalidField for annotations that
    cannot be meant.
    """
    check_annotations(pod, rules)
    together = RESOURCES if decided_jointly(pod, rules) else frozenset()
    asked = {container.name: container for container in (*pod.init_containers, *pod.containers)}
    if asked.keys() != {allocation.owner.container for allocation in held if allocation.owner is not None}:
        return False  # a part of it may have been given back
    for allocation in held:
        container = asked.get(allocation.owner.container) if allocation.owner is not None else None
        if container is None:
            return False
        if together and not is_held(state, pod, container, rules, allocation):
            return False
        devices = {name: n for name, n in device_limits(container).items() if n and name not in together}
        sizes = {block.resource: 0 for block in allocation.memory}
        for block in allocation.memory:
            sizes[block.resource] += block.size
        if (
            {name: len(ids) for name, ids in allocation.devices.items() if name not in together} != devices
            or (allocation.virtual_functions and not together)
            or (allocation.cpus and len(parse_cpuset(allocation.cpus)) * 1000 != container.requests.get(CPU))
            or not all(is_size(allocation, size, container.requests.get(name, 0)) for name, size in sizes.items())
        ):
            return False
    return True


def is_size(allocation: Allocation, size: int, asked: int) -> bool:
    """Later containers of the pod take what they reuse of an init container's memory out of its record."""
    return size <= asked if allocation.role == "init" else size == asked
