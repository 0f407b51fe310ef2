"""none: nothing is aligned. The hint providers are not asked, and every container is admitted."""

from collections.abc import Sequence

from topoalign.core.hints.model import TopologyHint
from topoalign.core.hints.search import Work
from topoalign.core.policy.closeness import Distances
from topoalign.core.policy.folding import Offer
from topoalign.core.policy.merge import NOWHERE
from topoalign.core.requests import Mode
from topoalign.core.topology.bitmask import Mask


class NonePolicy:
    name = "none"
    asks = False

    def merge(
        self,
        offers: Sequence[Offer],
        machine: Mask,
        distances: Distances | None = None,
        mode: Mode = Mode.KUBELET,
        work: Work | None = None,
    ) -> TopologyHint:
        return NOWHERE

    def admits(self, hint: TopologyHint) -> bool:
        return True
