"""Policy `best-effort`: aligns as well as the hints allow, and admits every container."""

from topoalign.core.model.hints import TopologyHint
from topoalign.core.policy.merge.kubelet_merge import merge
from topoalign.core.policy.merge.narrowest_fit import narrowest_fit
from topoalign.core.policy.topology_policy import MergeQuestion, TopologyPolicy
from topoalign.core.profile import profile_of


class BestEffortPolicy(TopologyPolicy):
    """The kubelet's policy best-effort."""

    name = "best-effort"

    def merge(self, asked: MergeQuestion) -> TopologyHint:
        """Returns the best hint that the offers have in common. Raises TooMuchWork."""
        if not profile_of(asked.mode).merges_combinations:
            return narrowest_fit(asked.offers, asked.machine, asked.distances, asked.work, asked.order)
        return merge(asked.offers, asked.machine, asked.distances, asked.work)

    def admits(self, hint: TopologyHint) -> bool:
        """Admits every hint, including the whole machine."""
        return True
