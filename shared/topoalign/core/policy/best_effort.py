"""best-effort: align as well as the hints allow, and admit every container."""

from collections.abc import Sequence

from topoalign.core.hints.model import TopologyHint
from topoalign.core.hints.search import Work
from topoalign.core.policy.closeness import Distances
from topoalign.core.policy.fitting import fit
from topoalign.core.policy.folding import Offer
from topoalign.core.policy.merge import merge
from topoalign.core.requests import Mode
from topoalign.core.topology.bitmask import Mask


class BestEffortPolicy:
    name = "best-effort"
    asks = True

    def merge(
        self,
        offers: Sequence[Offer],
        machine: Mask,
        distances: Distances | None = None,
        mode: Mode = Mode.KUBELET,
        work: Work | None = None,
    ) -> TopologyHint:
        if mode is Mode.BEST:
            return fit(offers, machine, distances, work)
        return merge(offers, machine, distances, work)

    def admits(self, hint: TopologyHint) -> bool:
        return True
