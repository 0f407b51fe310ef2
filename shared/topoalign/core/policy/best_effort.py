"""Policy `best-effort`: aligns as well as the hints allow, and admits every container."""

from collections.abc import Sequence

from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.policy.merge.closeness import Distances, MaskOrder
from topoalign.core.policy.merge.hint_combinations import Offer
from topoalign.core.policy.merge.kubelet_merge import merge
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit
from topoalign.core.profile import profile_of


class BestEffortPolicy:
    """The kubelet's best-effort: aligns as well as the hints allow, and admits every container."""

    name = "best-effort"
    asks = True
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
        """Returns the best hint that the offers have in common, as `TopologyPolicy.merge`. Raises TooMuchWork."""
        if not profile_of(mode).merges_combinations:
            return narrowest_fit(offers, machine, distances, work, order)
        return merge(offers, machine, distances, work)

    def admits(self, hint: TopologyHint) -> bool:
        """Admits every hint, the whole machine included."""
        return True
