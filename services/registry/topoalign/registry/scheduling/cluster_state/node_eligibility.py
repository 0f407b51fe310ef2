"""The data of the cluster view for each node, and why a node is not offered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.free_amounts import Free
from topoalign.core.admission.prediction import KubeletUnknown, NodeKind
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.registry.cluster_nodes import ClusterNode

# A node is offered to the scheduler only if its data is complete, it answers, it has one writer, and the rules of its
# kubelet are known. Else every pod is refused with one of the codes below.


UNKNOWN_NODE = "UnknownNode"
"""No fact of the node was received, or its Node was deleted."""
DUPLICATE_AGENT = "DuplicateAgent"
"""Two allocators publish for it."""
NODE_NOT_WHOLE = "NodeNotWhole"
"""Hardware, health or allocations are not known, or facts about these are missing."""
NODE_STALE = "NodeStale"
"""Its allocator does not answer."""
KUBELET_UNKNOWN = KubeletUnknown.code
"""The rules or the allocations of its kubelet are not known."""
NOT_KNOWN = frozenset({UNKNOWN_NODE, DUPLICATE_AGENT, NODE_NOT_WHOLE, NODE_STALE, KUBELET_UNKNOWN})
"""Codes of obstacles that this registry has and another one may not have."""


def obstacle(member: ClusterNode, unsettled: Unsettled) -> str:
    """Returns the code of the refusal for every pod that does not depend on the kubelet; empty if there is none."""
    state = member.state
    if state.node in unsettled.duplicate_agents:
        return DUPLICATE_AGENT
    if state.topology is None or state.health is None or not state.epoch or state.node in unsettled.incomplete:
        return NODE_NOT_WHOLE
    return "" if member.answering else NODE_STALE


@dataclass(slots=True, eq=False, weakref_slot=True)
class NodeView:
    """One node as the scheduler sees it."""

    name: NodeName
    place: int
    """Its index in arrays with an entry for each node."""
    version: int = 0
    """The version of the cluster at its last change."""
    refusal: str = UNKNOWN_NODE
    """Why it is offered to no pod; empty: it is offered."""
    kind: NodeKind | None = None
    """None where it is not offered, as `free`."""
    free: Free | None = None
    idle: Free | None = None
    """The free resources of the empty node, if some devices are unhealthy or cordoned; None: none are."""
    shape: Topology | None = None
    """The revision of its published hardware."""
    left: Any = None
    """Its free resources, for its score; None if they are not known."""


def with_contiguous_names(places: Mapping[NodeName, int]) -> dict[NodeName, int]:
    """
    Returns the mapping with copies of the names that are adjacent in memory. Names arrive one by one with the facts of their
    nodes and are scattered in memory; looking up 5,000 of them took half as long again.
    """
    names = msgspec.json.decode(msgspec.json.encode(sorted(places)), type=list[NodeName])
    return {name: places[name] for name in names}
