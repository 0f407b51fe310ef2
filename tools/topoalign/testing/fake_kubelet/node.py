"""The node as the managers of the fake kubelet see it: allocations by the names of the pods."""

from collections.abc import Iterator, Mapping

from topoalign.core.model.events import Allocation, DeviceHealth, DeviceHealthChanged, Owner, TopologyDiscovered
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.testing.fake_kubelet.admission import Managers
from topoalign.testing.fake_kubelet.pods import Running


def node_state(
    topology: TopologyDiscovered,
    health: Mapping[DeviceID, DeviceHealth],
    managers: Managers,
    pods: Mapping[str, Running],
    active: frozenset[str] | None,
) -> NodeState:
    """
    The node without what pods have that are not `active` (None: with all of it). `pods`: those with a name, by UID.
    """
    there = [uid for uid in managers.pods() if active is None or uid in active]
    allocations = [each for uid in there for each in allocations_of(uid, pods.get(uid), managers)]
    return NodeState(
        node=topology.node,
        topology=topology,
        health=DeviceHealthChanged(node=topology.node, epoch=1, revision=topology.revision, devices=dict(health)),
        allocations={allocation.id: allocation for allocation in allocations},
        memory=managers.memory.use_without(uid for uid in list(managers.memory.blocks) if uid not in there),
    )


def allocations_of(uid: str, running: Running | None, managers: Managers) -> Iterator[Allocation]:
    """One of each container of a pod that holds anything. A pod that has no name any more goes by its UID."""
    held = managers.devices.held.get(uid, {})
    cpus = managers.cpus.assigned.get(uid, {})
    blocks = managers.memory.blocks.get(uid, {})
    namespace, pod = (running.pod.namespace, running.pod.name) if running is not None else ("", uid)
    names: tuple[str, ...] = (*(container for container, _ in held), *cpus, *blocks)
    for name in dict.fromkeys(names):
        yield Allocation(
            id=AllocationID(f"{namespace}/{pod}/{name}"),
            owner=Owner(namespace=Namespace(namespace), pod=PodName(pod), container=ContainerName(name)),
            devices={resource: devices for (container, resource), devices in held.items() if container == name},
            cpus=format_cpuset(cpus.get(name, ())),
            memory=blocks.get(name, ()),
            lowest_first=name in blocks,
        )
