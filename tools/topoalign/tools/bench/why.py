"""
The time of questions to a whole cluster: 500 nodes with eight GPUs each, all with uuids of their own, half full.

Each call begins with the nodes' records, as `topoalign why` does once it has them. `why` is a pod that fits nowhere, with
the changes that would make it fit; `where` one that fits on many nodes, which are ranked; `gang` has 512 pods with two GPUs
each. `score` is `quality` of one node: `cold` for free GPUs that no node of the model had before, `kept` as for most nodes.
"""

import random
from collections.abc import Iterator
from functools import partial

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.diagnosis.cluster_answer import ClusterAnswer
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import ClusterRecord, record_node
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import HEALTHY, AllocationsSnapshot, UsageObserved
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, DeviceID, NodeName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import Shapes, rename_devices
from topoalign.core.scoring.quality import FreeDevices, NodePacking, compute_key, device_need, node_key
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.machines import load_machine
from topoalign.tools.bench.admit import pod_of
from topoalign.tools.measuring import measure_calls

NODES = 500
GANG = 512
TIME = 1_800_000_000.0
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
CALLS = 10


def cases() -> Iterator[dict[str, object]]:
    """Measure each case; times in milliseconds."""
    cluster = half_full_cluster()
    alone, pair = (pod_of({GPU: size, CPU: 8_000, MEMORY: 16 << 30}, "asked") for size in (8, 2))
    for case, pod, pods in (("why", alone, 1), ("where", pair, 1), ("gang", pair, GANG)):
        yield measure_calls(case, partial(ask, cluster, pod, pods), CALLS, warm=1)
    yield from scores(load_machine("hgx-h100").topology)


def ask(cluster: ClusterRecord, pod: PodRequest, pods: int) -> ClusterAnswer:
    """What the cluster says."""
    return diagnose(Nodes(cluster), pod, scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK), pods=pods)


def scores(topology: Topology) -> Iterator[dict[str, object]]:
    """A pod with two GPUs and a NIC; each call has other GPUs free."""
    need = device_need(topology, read_pod(pod_of({GPU: 2, NIC: 1}), RULES))
    free = [FreeDevices({GPU: gpus, NIC: 255}, (), ()) for gpus in range(256)]
    random.Random(1).shuffle(free)
    cold = iter(free)
    kept = iter(free)
    yield measure_calls(
        "score-cold", lambda: compute_key(topology, need, next(cold), NodePacking.BINPACK), len(free), warm=0
    )
    for each in free:
        node_key(topology, need, each, NodePacking.BINPACK)
    yield measure_calls(
        "score-kept", lambda: node_key(topology, need, next(kept), NodePacking.BINPACK), len(free), warm=0
    )


def half_full_cluster() -> ClusterRecord:
    """Nodes on which pods with one or two GPUs hold half of all, in different ways."""
    model = load_machine("hgx-h100").topology
    shapes = Shapes()
    chance = random.Random(5)
    nodes = []
    for number in range(NODES):
        uuids = {gpu: DeviceID(f"GPU-{number:04d}-{place}") for place, gpu in enumerate(model.gpu_by_id)}
        state = empty_node(NodeName(f"node-{number:04d}"), shapes.interned(rename_devices(model, uuids)))
        for size in chance.choice(([1, 1, 2], [1, 2, 1], [2, 2], [1, 1, 1, 1])):
            pod = pod_of(
                {GPU: size, CPU: chance.choice((4_000, 8_000)), MEMORY: 16 << 30}, f"p{len(state.allocations)}"
            )
            demand = read_pod(pod, RULES)
            decision = decide_demand(as_others(state, demand), demand)
            assert isinstance(decision, Admission), "half of a node is free"
            for each in decision.allocations:
                state = state.holding(each)
        nodes.append(record_node(announcing(state)))
    return ClusterRecord(time=TIME, nodes=tuple(nodes))


def empty_node(name: NodeName, topology: Topology) -> NodeState:
    """A node with all devices healthy and none allocated."""
    cards = [*topology.gpu_by_id, *topology.nic_by_id]
    return initial_state(name, topology, dict.fromkeys(cards, HEALTHY), "described: bench")


def announcing(state: NodeState) -> NodeState:
    """The node as it announces itself: devices in its record, CPUs and memory in its kubelet's checkpoints."""
    held = [*state.allocations.values()]
    entries = tuple(
        CheckpointEntry(pod_uid=each.owner.pod, container=each.owner.container, cpus=each.cpus, memory=each.memory)
        for each in held
        if each.owner is not None
    )
    kubelet = KubeletObserved(rules=to_kubelet_rules(RULES), entries=entries, memory=dict(state.memory))
    devices = tuple(msgspec.structs.replace(each, cpus="", memory=()) for each in held)
    bare = NodeState(node=state.node, topology=state.topology, health=state.health)
    snapshot = AllocationsSnapshot(node=state.node, epoch=1, seq=1, allocations=devices, digest="")
    usage = UsageObserved(node=state.node, epoch=1, revision=1, containers=(), kubelet=kubelet)
    return bare.apply(snapshot).apply(usage)
