"""Defines a topology policy, which merges hints and decides whether the merged hint is good enough."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.policy.merge.closest_numa import Distances, MaskOrder
from topoalign.core.policy.merge.kubelet_merge import Offer


class MergeQuestion(NamedTuple):
    """What a policy is to merge."""

    offers: Sequence[Offer]
    machine: Mask
    distances: Distances | None = None
    """Given where the closest NUMA nodes are to be preferred."""
    mode: Mode = Mode.KUBELET
    work: NumaSearchBudget | None = None
    order: MaskOrder | None = None
    """Sorts equally narrow sets of NUMA nodes in mode `best`."""


class TopologyPolicy(ABC):
    """Base of the topology policies: one that asks the hint providers and admits preferred hints only."""

    name: ClassVar[str]
    asks: ClassVar[bool] = True
    """Whether the hint providers are asked at all."""
    single_node: ClassVar[bool] = False
    """Whether all of a container must be on one NUMA node: then only hints for one node, or for any, count."""

    @abstractmethod
    def merge(self, asked: MergeQuestion) -> TopologyHint:
        """The hint to align to: the kubelet's merge, or in mode `best` that of `narrowest_fit`. Raises TooMuchWork."""

    def admits(self, hint: TopologyHint) -> bool:
        """Whether a container may run with this hint."""
        return hint.preferred
