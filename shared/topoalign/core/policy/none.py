"""Policy `none`: aligns nothing. The hint providers are not asked, and every container is admitted."""

from topoalign.core.model.hints import TopologyHint
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.policy.topology_policy import MergeQuestion, TopologyPolicy


class NonePolicy(TopologyPolicy):
    """The kubelet's policy none."""

    name = "none"
    asks = False

    def merge(self, asked: MergeQuestion) -> TopologyHint:
        """Returns the hint for any node, regardless of the offers."""
        return NO_AFFINITY

    def admits(self, hint: TopologyHint) -> bool:
        """Admits every hint."""
        return True
