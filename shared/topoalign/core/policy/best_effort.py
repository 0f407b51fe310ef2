"""best-effort: align as well as the hints allow, and admit every container."""

from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy.merge import Distances, HintLists, merge
from topoalign.core.topology.bitmask import Mask


class BestEffortPolicy:
    name = "best-effort"
    asks = True

    def merge(self, lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
        return merge(lists, machine, distances)

    def admits(self, hint: TopologyHint) -> bool:
        return True
