"""
Policy `single-numa-node`: admits a container only if all its requests fit on one NUMA node.

The rule (kubelet v1.36.3): only preferred hints for one node, or for any node, are merged. If the merged hint is the
whole machine, the container has no affinity. Distances do not count.

In mode `best`, the narrowest set of nodes on which all requests fit must be a single node.
"""

from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.numa_sets.search import mask_meets_needs
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY, Offer, merge
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit
from topoalign.core.policy.topology_policy import MergeQuestion, TopologyPolicy
from topoalign.core.profile import profile_of


class SingleNumaNodePolicy(TopologyPolicy):
    """The kubelet's policy single-numa-node."""

    name = "single-numa-node"
    single_node = True

    def merge(self, asked: MergeQuestion) -> TopologyHint:
        """Returns the best hint for one node; not preferred if there is none. Raises TooMuchWork."""
        machine = asked.machine
        if not profile_of(asked.mode).merges_combinations:
            best = narrowest_fit(asked.offers, machine, None, asked.work, asked.order)
            return best if best.affinity is None or best.affinity.bit_count() == 1 else NO_AFFINITY
        best = merge([single(offer) for offer in asked.offers], machine, None, asked.work)
        return TopologyHint(None, best.preferred) if best.affinity == machine else best


def single(offer: Offer) -> list[TopologyHint]:
    """The preferred hints of an offer for one node or for any node. A rule is expanded to its hints."""
    if isinstance(offer, HintRule):
        masks = {1 << node for node in nodes_of(offer.nodes) if mask_meets_needs(offer.needs, 1 << node)} | {
            *offer.besides
        }
        return [TopologyHint(mask, True) for mask in sorted(masks) if mask.bit_count() == 1 == offer.least]
    return [h for h in offer if h.preferred and (h.affinity is None or h.affinity.bit_count() == 1)]
