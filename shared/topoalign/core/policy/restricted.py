"""restricted: align as best-effort does, and admit only what is aligned as well as it can be."""

from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy.merge import Distances, HintLists, merge
from topoalign.core.topology.bitmask import Mask


class RestrictedPolicy:
    name = "restricted"
    asks = True

    def merge(self, lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
        return merge(lists, machine, distances)

    def admits(self, hint: TopologyHint) -> bool:
        return hint.preferred
