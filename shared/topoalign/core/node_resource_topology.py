"""
Builds the NodeResourceTopology of a node (topology.node.k8s.io/v1alpha2), from which scheduler plugins read what each
NUMA node has.

A zone of type `Node` stands for a NUMA node. It has the distances to all of them as costs, and of each resource the
capacity, what containers may have of it, and what is left, as quantities of Kubernetes: CPUs, bytes, devices. The
attributes contain the rules of the kubelet's Topology Manager. `topologyPolicies`, which is deprecated, is left out.

    zones: [{name: node-0, type: Node, costs: [{name: node-0, value: 10}, {name: node-1, value: 21}],
             resources: [{name: cpu, capacity: "8", allocatable: "7", available: "5"}]}]
    attributes: [{name: topologyManagerPolicy, value: single-numa-node}]
"""

from typing import Literal

import msgspec

from topoalign.core.model.ids import CPU, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.scoring.zones import MILLICORES, Zone, zones_of
from topoalign.core.state.fold import NodeState


class Attribute(msgspec.Struct, frozen=True):
    """A named value."""

    name: str
    value: str


class Cost(msgspec.Struct, frozen=True):
    """The distance to a zone."""

    name: str
    value: int
    """ACPI SLIT: 10 is local."""


class ResourceInfo(msgspec.Struct, frozen=True):
    """How much of a resource a zone has."""

    name: ResourceName
    capacity: str
    allocatable: str
    available: str


class ZoneInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One NUMA node."""

    name: str
    """`node-<id>`."""
    type: str
    costs: tuple[Cost, ...] = ()
    """Absent where the distances are not known."""
    resources: tuple[ResourceInfo, ...] = ()
    """Those of which it has some, by name."""


class TopologyMetadata(msgspec.Struct, frozen=True):
    """The object is called like its node."""

    name: NodeName


class NodeResourceTopology(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The object, with the fields of its JSON."""

    api_version: Literal["topology.node.k8s.io/v1alpha2"] = "topology.node.k8s.io/v1alpha2"
    kind: Literal["NodeResourceTopology"] = "NodeResourceTopology"
    metadata: TopologyMetadata
    zones: tuple[ZoneInfo, ...]
    attributes: tuple[Attribute, ...]


def node_resource_topology(state: NodeState, rules: AdmissionRules) -> NodeResourceTopology:
    """The object of a node under its kubelet's rules. Raises NotEnoughCpus and TooMuchWork."""
    attributes = {
        "topologyManagerPolicy": rules.policy.value,
        "topologyManagerScope": rules.scope.value,
        "topologyManagerMaxNUMANodes": str(rules.max_allowable_numa_nodes),
    }
    return NodeResourceTopology(
        metadata=TopologyMetadata(state.node),
        zones=tuple(map(zone_info, zones_of(state, rules))),
        attributes=tuple(Attribute(name, value) for name, value in attributes.items()),
    )


def zone_info(zone: Zone) -> ZoneInfo:
    """A NUMA node as a zone."""
    return ZoneInfo(
        name=zone_name(zone.id),
        type="Node",
        costs=tuple(Cost(zone_name(node), distance) for node, distance in zone.costs.items()),
        resources=tuple(
            ResourceInfo(
                name,
                format_quantity(name, capacity),
                format_quantity(name, zone.allocatable.get(name, 0)),
                format_quantity(name, zone.available.get(name, 0)),
            )
            for name, capacity in sorted(zone.capacity.items())
            if capacity
        ),
    )


def zone_name(node: int) -> str:
    """What the zone of a NUMA node is called."""
    return f"node-{node}"


def format_quantity(resource: ResourceName, amount: int) -> str:
    """An amount as Kubernetes writes it. CPUs are whole here."""
    return str(amount // MILLICORES if resource == CPU else amount)
