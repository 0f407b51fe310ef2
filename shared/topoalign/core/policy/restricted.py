"""Policy `restricted`: aligns as `best-effort` does, and admits a container only if the merged hint is preferred."""

from topoalign.core.model.hints import TopologyHint
from topoalign.core.policy.best_effort import BestEffortPolicy


class RestrictedPolicy(BestEffortPolicy):
    """The kubelet's policy restricted."""

    name = "restricted"

    def admits(self, hint: TopologyHint) -> bool:
        """Admits a hint if it is preferred."""
        return hint.preferred
