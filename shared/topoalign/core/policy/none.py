"""Policy `none`: aligns nothing. The hint providers are not asked, and every container is admitted."""

from collections.abc import Sequence

from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.policy.merge.closeness import Distances, MaskOrder
from topoalign.core.policy.merge.hint_combinations import Offer
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY


class NonePolicy:
    """The kubelet's none: aligns nothing, asks no hint provider, and admits every container."""

    name = "none"
    asks = False
    single_node = False

    def merge(
        self,
        offers: Sequence[Offer],
        machine: Mask,
        distances: Distances | None = None,
        mode: Mode = Mode.KUBELET,
        work: NumaSearchBudget | None = None,
        order: MaskOrder | None = None,
    ) -> TopologyHint:
        """Returns the hint for any node, whatever the offers."""
        return NO_AFFINITY

    def admits(self, hint: TopologyHint) -> bool:
        """Admits every hint."""
        return True
