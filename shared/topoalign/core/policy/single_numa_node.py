"""
Policy `single-numa-node`: admits a container only if everything it asks for fits on one NUMA node.

The rule (kubelet v1.36.3): of each list, only the preferred hints that name one node (or no node at all) are worth merging.
If the merge ends with the whole machine, no node was singled out, and the affinity is left open. Distances do not count.

In mode `best` the narrowest nodes on which everything fits must be one node.
"""

from collections.abc import Sequence

from topoalign.core.model.hints import HintRule, TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.numa_sets.search import NumaSearchBudget, mask_meets_needs
from topoalign.core.policy.merge.closeness import Distances, MaskOrder
from topoalign.core.policy.merge.hint_combinations import Offer
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY, merge
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit
from topoalign.core.profile import profile_of


class SingleNumaNodePolicy:
    """The kubelet's single-numa-node: admits a container only if all that it asks for fits on one NUMA node."""

    name = "single-numa-node"
    asks = True
    single_node = True

    def merge(
        self,
        offers: Sequence[Offer],
        machine: Mask,
        distances: Distances | None = None,
        mode: Mode = Mode.KUBELET,
        work: NumaSearchBudget | None = None,
        order: MaskOrder | None = None,
    ) -> TopologyHint:
        """Returns the best hint for one node; not preferred if there is none. Raises TooMuchWork."""
        if not profile_of(mode).merges_combinations:
            best = narrowest_fit(offers, machine, None, work, order)
            return best if best.affinity is None or best.affinity.bit_count() == 1 else NO_AFFINITY
        best = merge([single(offer) for offer in offers], machine, None, work)
        return TopologyHint(None, best.preferred) if best.affinity == machine else best

    def admits(self, hint: TopologyHint) -> bool:
        """Admits a hint if it is preferred."""
        return hint.preferred


def single(offer: Offer) -> list[TopologyHint]:
    """The preferred hints of an offer for one node or for any; a rule is listed."""
    if isinstance(offer, HintRule):
        masks = {1 << node for node in nodes_of(offer.nodes) if mask_meets_needs(offer.needs, 1 << node)} | {
            *offer.besides
        }
        return [TopologyHint(mask, True) for mask in sorted(masks) if mask.bit_count() == 1 == offer.least]
    return [h for h in offer if h.preferred and (h.affinity is None or h.affinity.bit_count() == 1)]
