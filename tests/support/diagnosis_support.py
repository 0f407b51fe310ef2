"""Clusters for questions about all nodes: machines of the catalogue under a kubelet, with pods that hold something."""

from decision_support import machine as small_machine
from decision_support import node

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, record_node
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import (
    Allocation,
    AllocationsSnapshot,
    UsageObserved,
)
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import Shapes, rename_devices
from topoalign.core.state.fold import NodeState

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
TIME = 1_800_000_000.0
SHAPES = Shapes()


def cluster(*nodes: NodeRecord) -> ClusterRecord:
    return ClusterRecord(time=TIME, nodes=tuple(sorted(nodes, key=lambda each: each.node)))


def node_with(
    name: str,
    *pods: PodRequest,
    topology: Topology | None = None,
    rules: AdmissionRules = RULES,
) -> NodeRecord:
    """A node whose kubelet has admitted these pods one after the other; devices, CPUs and memory as its files tell them."""
    state = node(SHAPES.interned(topology or small_machine()), name=NodeName(name))
    for pod in pods:
        demand = read_pod(pod, rules)
        decision = decide_demand(as_others(state, demand), demand)
        assert isinstance(decision, Admission), decision
        for each in decision.allocations:
            state = state.holding(each)
    return told(state, rules)


def told(state: NodeState, rules: AdmissionRules) -> NodeRecord:
    """What this node says: its record has the devices, its kubelet's checkpoints the CPUs and the memory."""
    held = [each for each in state.allocations.values() if each.owner is not None]
    uid = {each.id: f"uid-{each.owner.pod}" for each in held if each.owner is not None}
    entries = [
        CheckpointEntry(
            pod_uid=uid[each.id], container=each.owner.container, cpus=each.cpus, memory=each.memory, mounted=True
        )
        for each in held
        if each.owner is not None
    ]
    kubelet = KubeletObserved(rules=to_kubelet_rules(rules), entries=tuple(entries), memory=dict(state.memory))
    granted = tuple(
        Allocation(id=each.id, owner=each.owner, devices=each.devices, pod_uid=uid[each.id])
        for each in held
        if each.devices
    )
    bare = NodeState(node=state.node, topology=state.topology, health=state.health)
    bare = bare.apply(AllocationsSnapshot(node=state.node, epoch=1, seq=1, allocations=granted, digest=""))
    usage = UsageObserved(node=state.node, epoch=1, revision=1, containers=(), kubelet=kubelet)
    return record_node(bare.apply(usage))


def machines(topology: Topology, number: int) -> Topology:
    """The same machine with uuids of its own."""
    return rename_devices(
        topology, {gpu: DeviceID(f"GPU-{number:04d}-{i}") for i, gpu in enumerate(topology.gpu_by_id)}
    )
