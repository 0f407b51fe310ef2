"""
Whether a node is offered to the scheduler at all: it has to be whole, to answer, to have one writer, and to tell by which
rules its kubelet decides. Where it is not, every pod is refused with one of the codes below.
"""

from topoalign.client.verifying import Unsettled
from topoalign.core.admission.prediction import KubeletUnknown
from topoalign.registry.cluster import Member

UNKNOWN_NODE = "UnknownNode"
"""Nothing was ever heard of it, or its Node was deleted."""
TWIN_NODE = "TwinNode"
"""Two allocators speak for it."""
NODE_NOT_WHOLE = "NodeNotWhole"
"""Hardware, health or allocations are not known, or facts about these are missing."""
NODE_STALE = "NodeStale"
"""Its allocator does not answer."""
KUBELET_UNKNOWN = KubeletUnknown.code
"""By which rules its kubelet decides, or what it has given out, is not known."""
NOT_KNOWN = frozenset({UNKNOWN_NODE, TWIN_NODE, NODE_NOT_WHOLE, NODE_STALE, KUBELET_UNKNOWN})
"""What one registry cannot judge now, and another one perhaps can."""


def obstacle(member: Member, unsettled: Unsettled) -> str:
    """The code of the refusal for every pod, as far as that depends on no kubelet; empty where there is none."""
    state = member.state
    if state.node in unsettled.twins:
        return TWIN_NODE
    if state.topology is None or state.health is None or not state.epoch or state.node in unsettled.incomplete:
        return NODE_NOT_WHOLE
    return "" if member.answering else NODE_STALE
