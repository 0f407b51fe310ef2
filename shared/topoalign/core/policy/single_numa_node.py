"""
single-numa-node: admit a container only if all it asks for fits on one NUMA node.

The rule: of each list, only the preferred hints that name one node (or no node at all) are worth merging. If the merge
ends with the whole machine, no node was singled out, and the affinity is left open. Distances have no say here.
"""

from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy.merge import Distances, HintLists, merge
from topoalign.core.topology.bitmask import Mask


class SingleNumaNodePolicy:
    name = "single-numa-node"
    asks = True

    def merge(self, lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
        best = merge([[hint for hint in hints if fits_one_node(hint)] for hints in lists], machine)
        return TopologyHint(None, best.preferred) if best.affinity == machine else best

    def admits(self, hint: TopologyHint) -> bool:
        return hint.preferred


def fits_one_node(hint: TopologyHint) -> bool:
    return hint.preferred and (hint.affinity is None or hint.affinity.bit_count() == 1)
