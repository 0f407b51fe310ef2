"""none: nothing is aligned. The hint providers are not asked, and every container is admitted."""

from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy.merge import NOWHERE, Distances, HintLists
from topoalign.core.topology.bitmask import Mask


class NonePolicy:
    name = "none"
    asks = False

    def merge(self, lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
        return NOWHERE

    def admits(self, hint: TopologyHint) -> bool:
        return True
