"""
Builds the NodeResourceTopology of a node (topology.node.k8s.io/v1alpha2), from which scheduler plugins read the
resources of each NUMA node.

A zone of type `Node` stands for a NUMA node. Its costs are the distances to all NUMA nodes. Each of its resources has
the capacity, the allocatable amount and the available amount, as quantities of Kubernetes: CPUs, bytes, devices. The
attributes contain the settings of the kubelet's Topology Manager. `topologyPolicies`, which is deprecated, is omitted.

    zones: [{name: node-0, type: Node, costs: [{name: node-0, value: 10}, {name: node-1, value: 21}],
             resources: [{name: cpu, capacity: "8", allocatable: "7", available: "5"}]}]
    attributes: [{name: topologyManagerPolicy, value: single-numa-node}]
"""

from collections.abc import Mapping
from typing import Any

from topoalign.core.model.ids import CPU, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.scoring.zones import MILLICORES, Zone, zones_of
from topoalign.core.state.fold import NodeState

NodeResourceTopology = dict[str, Any]
"""The object as JSON."""


def node_resource_topology(state: NodeState, rules: AdmissionRules) -> NodeResourceTopology:
    """The object of a node with the settings of its kubelet. Raises NotEnoughCpus and TooMuchWork."""
    attributes = {
        "topologyManagerPolicy": rules.policy.value,
        "topologyManagerScope": rules.scope.value,
        "topologyManagerMaxNUMANodes": str(rules.max_allowable_numa_nodes),
    }
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": state.node},
        "zones": tuple(map(_zone_info, zones_of(state, rules))),
        "attributes": tuple({"name": name, "value": value} for name, value in attributes.items()),
    }


def _zone_info(zone: Zone) -> dict[str, Any]:
    def quantity(name: ResourceName, amounts: Mapping[ResourceName, int]) -> str:
        amount = amounts.get(name, 0)
        return str(amount // MILLICORES if name == CPU else amount)  # in whole CPUs

    info: dict[str, Any] = {"name": f"node-{zone.id}", "type": "Node"}
    if zone.costs:  # the distances are known
        info["costs"] = tuple({"name": f"node-{node}", "value": distance} for node, distance in zone.costs.items())
    resources = tuple(
        {
            "name": name,
            "capacity": quantity(name, zone.capacity),
            "allocatable": quantity(name, zone.allocatable),
            "available": quantity(name, zone.available),
        }
        for name, capacity in sorted(zone.capacity.items())
        if capacity
    )
    return {**info, "resources": resources} if resources else info
