"""The NodeResourceTopology of a node has what its kubelet has, as Kubernetes writes it."""

import msgspec
from decision_support import GIB, machine, node

from topoalign.core.model.events import Allocation, MemoryBlock
from topoalign.core.model.ids import GPU, MEMORY, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, Policy, Scope
from topoalign.core.node_resource_topology import node_resource_topology

RULES = AdmissionRules(
    mode=Mode.KUBELET,
    policy=Policy.SINGLE_NUMA_NODE,
    scope=Scope.POD,
    reserved_cpus="0",
    reserved_memory={0: {MEMORY: GIB}},
)
HELD = Allocation(
    id=AllocationID("a"),
    devices={GPU: (DeviceID("GPU-1"),)},
    cpus="2-3",
    memory=(MemoryBlock(resource=MEMORY, nodes=(0,), size=GIB, taken=(GIB,)),),
)


def test_the_object_tells_each_numa_node_and_the_rules() -> None:
    found = msgspec.to_builtins(node_resource_topology(node(machine()).holding(HELD), RULES))

    assert {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": "node-1"},
        "zones": (
            {
                "name": "node-0",
                "type": "Node",
                "costs": ({"name": "node-0", "value": 10}, {"name": "node-1", "value": 21}),
                "resources": (
                    {"name": "cpu", "capacity": "8", "allocatable": "7", "available": "5"},
                    {
                        "name": "memory",
                        "capacity": str(64 * GIB),
                        "allocatable": str(63 * GIB),
                        "available": str(62 * GIB),
                    },
                    {"name": "nvidia.com/gpu", "capacity": "2", "allocatable": "2", "available": "1"},
                    {"name": "topoalign.io/nic", "capacity": "1", "allocatable": "1", "available": "1"},
                ),
            },
            {
                "name": "node-1",
                "type": "Node",
                "costs": ({"name": "node-0", "value": 21}, {"name": "node-1", "value": 10}),
                "resources": (
                    {"name": "cpu", "capacity": "8", "allocatable": "8", "available": "8"},
                    {
                        "name": "memory",
                        "capacity": str(64 * GIB),
                        "allocatable": str(64 * GIB),
                        "available": str(64 * GIB),
                    },
                    {"name": "nvidia.com/gpu", "capacity": "2", "allocatable": "2", "available": "2"},
                    {"name": "topoalign.io/nic", "capacity": "1", "allocatable": "1", "available": "1"},
                ),
            },
        ),
        "attributes": (
            {"name": "topologyManagerPolicy", "value": "single-numa-node"},
            {"name": "topologyManagerScope", "value": "pod"},
            {"name": "topologyManagerMaxNUMANodes", "value": "8"},
        ),
    } == found


def test_what_is_not_known_or_not_there_is_left_out() -> None:
    """A third NUMA node has neither CPUs nor memory; of such a machine no distances are known here."""
    found = node_resource_topology(node(machine(bare_nodes=1, nics=())), RULES)

    assert [3, 3, 0] == [len(zone.get("resources", ())) for zone in found["zones"]]
    assert all("costs" not in zone for zone in found["zones"])
    assert {"name": "node-2", "type": "Node"} == found["zones"][2]
