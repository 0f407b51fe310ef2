"""What the view of the cluster has for each node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.free_amounts import Free
from topoalign.core.admission.kinds import NodeKind
from topoalign.core.admission.prediction import KubeletUnknown
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.registry.cluster import Member

# Whether a node is offered to the scheduler at all: it has to be whole, to answer, to have one writer, and to tell by
# which rules its kubelet decides. Where it is not, every pod is refused with one of the codes below.


UNKNOWN_NODE = "UnknownNode"
"""Nothing was ever received of it, or its Node was deleted."""
DUPLICATE_AGENT = "DuplicateAgent"
"""Two allocators speak for it."""
NODE_NOT_WHOLE = "NodeNotWhole"
"""Hardware, health or allocations are not known, or facts about these are missing."""
NODE_STALE = "NodeStale"
"""Its allocator does not answer."""
KUBELET_UNKNOWN = KubeletUnknown.code
"""By which rules its kubelet decides, or what it has given out, is not known."""
NOT_KNOWN = frozenset({UNKNOWN_NODE, DUPLICATE_AGENT, NODE_NOT_WHOLE, NODE_STALE, KUBELET_UNKNOWN})
"""What one registry cannot judge now, and another one perhaps can."""


def obstacle(member: Member, unsettled: Unsettled) -> str:
    """The code of the refusal for every pod, as far as that depends on no kubelet; empty where there is none."""
    state = member.state
    if state.node in unsettled.twins:
        return DUPLICATE_AGENT
    if state.topology is None or state.health is None or not state.epoch or state.node in unsettled.incomplete:
        return NODE_NOT_WHOLE
    return "" if member.answering else NODE_STALE


@dataclass(slots=True, eq=False, weakref_slot=True)
class NodeView:
    """One node as the scheduler sees it."""

    name: NodeName
    place: int
    """Its index in whatever has an entry for each node."""
    version: int = 0
    """Of the cluster, when this changed last."""
    refusal: str = UNKNOWN_NODE
    """Why it is offered to no pod; empty: it is offered."""
    kind: NodeKind | None = None
    """None where it is not offered, as `free`."""
    free: Free | None = None
    idle: Free | None = None
    """What would be free if nobody had anything, where some devices are unhealthy or cordoned; None: none are."""
    shape: Topology | None = None
    """Of its hardware as it was announced."""
    left: Any = None
    """What is left on it, for its score; None where that cannot be told."""


def side_by_side(places: Mapping[NodeName, int]) -> dict[NodeName, int]:
    """
    The same under copies of the names that lie side by side, by name. Names come one by one with the facts of their nodes,
    and lie far from one another; looking up 5,000 of them took half as long again.
    """
    names = msgspec.json.decode(msgspec.json.encode(sorted(places)), type=list[NodeName])
    return {name: places[name] for name in names}
