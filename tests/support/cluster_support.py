"""Nodes and allocations for tests of the registry, told to a cluster as facts."""

from fact_support import HEALTHY, Writer, discovered, judged

from topoalign.client import Delivery
from topoalign.core.model.events import (
    Allocation,
    DeviceHealth,
    Event,
    HealthState,
    LedgerFact,
    Owner,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster

HOSTILE = "\x1b[31mred\x1b[0m<script>{{x}}\n"
TIME = 1_767_323_045.0


def gpu(index: int) -> DeviceID:
    return DeviceID(f"GPU-{index:04d}")


def topology() -> Topology:
    return Topology(
        cpus=tuple(Cpu(id=i, core=i, socket=0, node=0, uncore=0) for i in range(8)),
        nodes=(NumaNode(id=0),),
        gpus=tuple(Gpu(id=gpu(i), index=i, pci=f"0000:0{i}:00.0", numa_affinity=(0,)) for i in range(4)),
        nics=(Nic(id=DeviceID("mlx5_0"), index=0, pci="0000:10:00.0"),),
    )


def allocation(name: str, pod: str | None, *gpus: int, namespace: str = "ml") -> Allocation:
    owner = Owner(namespace=Namespace(namespace), pod=PodName(pod), container=ContainerName("main")) if pod else None
    return Allocation(
        id=AllocationID(name), owner=owner, devices={GPU: tuple(gpu(i) for i in gpus)}, cpus="0-3", affinity=(0,)
    )


def tell(cluster: Cluster, event: Event) -> None:
    cluster.apply(heard_of(event, state_of(cluster, event.node), TIME))


def state_of(cluster: Cluster, node: NodeName) -> NodeState:
    return cluster.member(node).state if node in cluster else NodeState(node=node)


def heard_of(event: Event, had: NodeState, time: float | None, *, anew: bool = False) -> Delivery:
    """As the client hands it over, where this was known of the node before."""
    before = NodeState(node=event.node) if anew else had
    state = before.apply(event) if isinstance(event, LedgerFact) else None
    return Delivery(event=event, position=1, time=time, state=state, anew=anew)


def announce(cluster: Cluster, name: str, *allocations: Allocation) -> None:
    """A node with four GPUs, one of them unhealthy, that has granted these allocations."""
    health = {gpu(i): HEALTHY for i in range(3)}
    health[gpu(3)] = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
    tell(cluster, discovered(topology(), name, revision=7, boot_id="boot"))
    tell(cluster, judged(health, name))
    writer = Writer(name, epoch=5)
    tell(cluster, writer.snapshot())
    for granted in allocations:
        tell(cluster, writer.grant(granted))
