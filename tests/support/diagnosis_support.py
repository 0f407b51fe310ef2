"""Clusters for questions about all nodes: machines of the catalogue under a kubelet, with pods that hold something."""

from decision_support import machine as small_machine
from view_support import Says

from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, record_node
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import Shapes, rename_devices

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
    says = Says(name, topology or small_machine(), rules, SHAPES, epoch=1)
    assert all(says.all())
    for pod in pods:
        assert [*says.admit(pod, f"uid-{pod.name}")], pod
    return record_node(says.state)


def machines(topology: Topology, number: int) -> Topology:
    """The same machine with uuids of its own."""
    return rename_devices(
        topology, {gpu: DeviceID(f"GPU-{number:04d}-{i}") for i, gpu in enumerate(topology.gpu_by_id)}
    )
